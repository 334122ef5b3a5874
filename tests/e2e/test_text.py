"""A real ``eeserve`` with a generating bundle and an ordinary model."""

from __future__ import annotations

import json
import shutil
import signal
import urllib.request
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import tritonclient.grpc as triton
from tests.e2e.conftest import wait_until
from tests.models import mlp
from tests.text_models import PLACES, VOCABULARY, drawn_prompts, graphs_of

from offramp.client import Client
from offramp.generation.bundle.generating_bundle import GeneratingBundle
from offramp.generation.bundle.writing import write_generating_bundle
from offramp.generation.stages.onnx_text import OnnxTextBackend

MOST = 12
LETTERS = [chr(ord("a") + number) for number in range(26)] + [chr(0x4E00 + n) for n in range(14)]


def tokenizer() -> bytes:
    """A tokenizer of characters, for the vocabulary of the small models."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {letter: number for number, letter in enumerate(LETTERS)}
    assert len(vocabulary) == VOCABULARY
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    text: str = made.to_str()
    return text.encode()


def write_text(path: Path, *, encodes: bool = False, threshold: float = 0.1) -> GeneratingBundle:
    """Write a small model of random weights, with exits that are easily sure."""
    graphs = graphs_of(encodes=encodes)
    stages = tuple(
        replace(stage, threshold=None if stage.threshold is None else threshold)
        for stage in graphs.model.stages
    )
    model = replace(graphs.model, stages=stages, longest_prompt=PLACES - MOST, longest_answer=MOST)
    return write_generating_bundle(path, model, graphs.graphs, tokenizer=tokenizer())


def answers_of(bundle: GeneratingBundle, prompts: list[Any]) -> list[list[int]]:
    """Return the backend's own answers, one sequence after another."""
    source = PLACES if bundle.model.encoder else 0
    backend = OnnxTextBackend.of(bundle, slots=1, length=PLACES, source_length=source)
    thresholds = [stage.threshold for stage in bundle.model.stages]
    answers = []
    for prompt in prompts:
        backend.open(0, prompt)
        backend.prefill([0])
        tokens: list[int] = []
        while len(tokens) < MOST:
            for stage, threshold in enumerate(thresholds):
                said = backend.run(stage, [0])
                if threshold is None or said.confidences[0] >= threshold:
                    break
            tokens.append(int(said.tokens[0]))
            if threshold is not None:
                backend.leave(stage, [0])
            backend.accept([0], tokens[-1:])
        backend.close_slot(0)
        answers.append(tokens)
    return answers


@pytest.mark.parametrize("encodes", [False, True])
def test_text_is_served_beside_other_models(
    launch: Callable[..., Any], tmp_path: Path, encodes: bool
) -> None:
    bundle = write_text(tmp_path / "text.ee", encodes=encodes)
    prompts = drawn_prompts(6)
    answers = answers_of(bundle, prompts)
    onnx.save(mlp(), tmp_path / "mlp.onnx")
    server = launch(tmp_path / "mlp.onnx", bundle.path, "--text-slots=2", "--mode=leave")
    assert server.models == ("mlp", "text")
    with Client(server.address) as client:
        streams = [client.generate("text", prompt) for prompt in prompts]
        found = [list(stream) for stream in streams]
        assert [[token.token for token in tokens] for tokens in found] == answers
        exits = {token.exit for tokens in found for token in tokens}
        assert exits > {-1} and exits <= {-1, 0, 1}
        prompt = "".join(LETTERS[token] for token in prompts[0])
        pieces = [token.text for token in client.generate("text", prompt)]
        assert pieces == [LETTERS[token] for token in answers[0]]
        assert client.infer("mlp", server.inputs(3)).exits.shape == (3,)
        with closing(client.generate("text", prompts[0], max_tokens=PLACES)) as tokens:
            next(tokens)
    wait_until(lambda: server.metric("offramp_text_slots_in_use", model="text") == 0)
    assert server.metric("offramp_text_slots", model="text") == 2
    assert server.metric("offramp_text_cache_bytes", model="text") > 0
    body = json.dumps({"text_input": prompt, "max_tokens": 4}).encode()
    with urllib.request.urlopen(f"{server.url}/v2/models/text/generate", body, 30) as response:
        assert json.load(response)["output_ids"] == answers[0][:4]
    page = server.get("/")
    assert "slots of" in page and page.count("<section>") == 3
    with triton.InferenceServerClient(server.address) as client:
        (counts,) = client.get_inference_statistics("text").model_stats
    assert set(counts.response_stats) == {"exit 0", "exit 1", "final"}
    log = server.log.read_text()
    assert "2 sequences of" in log and "whose caches take" in log
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0


def test_models_of_a_repository_change_their_kind(
    launch: Callable[..., Any], tmp_path: Path
) -> None:
    repository = tmp_path / "models"
    (repository / "first").mkdir(parents=True)
    onnx.save(mlp(), repository / "first" / "1.onnx")
    server = launch(
        f"--model-repository={repository}", "--model-control=explicit", "--load-model=first",
        "--mode=off",
    )  # fmt: skip
    prompt = drawn_prompts(1)[0]
    with triton.InferenceServerClient(server.address) as control, Client(server.address) as client:
        (repository / "text").mkdir()
        bundle = write_text(repository / "text" / "1.ee", threshold=2.0)
        control.load_model("text")
        answer = [token.token for token in client.generate("text", prompt)]
        assert answer == answers_of(bundle, [prompt])[0]
        shutil.rmtree(bundle.path)
        write_text(bundle.path, encodes=True, threshold=2.0)
        control.load_model("text")  # it was written anew
        assert control.is_model_ready("text")
        again = [token.token for token in client.generate("text", prompt)]
        assert again == answers_of(GeneratingBundle.open(bundle.path), [prompt])[0] != answer
        assert server.metric("offramp_model_version", model="text:1") == 2
        onnx.save(mlp(), repository / "text" / "2.onnx")
        control.load_model("text")
        assert [t.name for t in control.get_model_metadata("text").inputs] == ["x"]
        control.unload_model("first")
        control.unload_model("text")
        assert not control.is_model_ready("text")
    assert server.process.poll() is None


def test_a_self_check_refuses_text(refused: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    bundle = write_text(tmp_path / "text.ee")
    code, told = refused(bundle.path, "--self-check")
    assert code == 1
    assert "text.ee is a model of another kind: leave it out" in told


def test_a_damaged_bundle_is_named(refused: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    bundle = write_text(tmp_path / "text.ee")
    (bundle.path / "head.onnx").write_bytes(b"")
    code, told = refused(bundle.path, "--grpc-port=0", "--http-port=0")
    assert code == 1
    assert "head.onnx" in told


def test_caches_beyond_the_memory_are_refused(
    refused: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    bundle = write_text(tmp_path / "text.ee")
    code, told = refused(
        bundle.path, "--text-slots=65536", "--text-length=16777216", "--grpc-port=0",
        "--http-port=0",
    )  # fmt: skip
    assert code == 1
    assert "caches of 65536 sequences of 16777216 tokens do not fit into memory" in told
