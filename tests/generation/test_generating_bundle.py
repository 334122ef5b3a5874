"""Generating bundles are whole or absent, refused when damaged, and hold each weight once."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest

from offramp.bundle import (
    BundleExistsError,
    BundleIntegrityError,
    BundleNotFoundError,
    BundleSchemaError,
    BundleWriteError,
)
from offramp.bundle.graph_weights import WEIGHTS, named_weights
from offramp.generation.bundle import writing
from offramp.generation.bundle.generating_bundle import (
    GENERATION,
    GENERATION_HASH,
    TOKENIZER,
    GeneratingBundle,
)
from offramp.generation.bundle.text_model import TextModel
from offramp.generation.bundle.writing import write_generating_bundle
from offramp.generation.for_server import EXTENSION
from offramp.generation.stages.onnx_text import OnnxTextBackend
from tests.text_loops import write_all
from tests.text_models import (
    LAYERS,
    PLACES,
    START,
    VOCABULARY,
    WIDTH,
    backend_of,
    drawn_prompts,
    exported,
    graphs_of,
)


@pytest.fixture(params=[False, True], ids=["decoder", "encoder-decoder"])
def encodes(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def written(path: Path, **made_with: Any) -> GeneratingBundle:
    graphs = graphs_of(**made_with)
    return write_generating_bundle(path, graphs.model, graphs.graphs, tokenizer=b"{}")


def test_a_bundle_holds_what_was_written(tmp_path: Path, encodes: bool) -> None:
    graphs = graphs_of(encodes=encodes)
    bundle = written(tmp_path / "text.ee", encodes=encodes)
    assert bundle.path == tmp_path / "text.ee"
    assert bundle.model == graphs.model
    assert bundle.model.start_token == (START if encodes else None)
    assert bundle.tokenizer() == b"{}"
    again = GeneratingBundle.open(bundle.path)
    assert again == bundle
    assert {n: again.whole_graph(n) for n in again.model.graphs} == dict(graphs.graphs)
    listed = {entry.path for entry in bundle.manifest.files}
    assert {*graphs.graphs, TOKENIZER} <= listed
    assert not list(tmp_path.glob(".*"))  # nothing is left of the writing


def test_a_backend_of_a_bundle_writes_the_same(tmp_path: Path, encodes: bool) -> None:
    bundle = written(tmp_path / "text.ee", encodes=encodes)
    prompts = drawn_prompts(8)
    backend = OnnxTextBackend.of(
        bundle, slots=4, length=PLACES, source_length=PLACES if encodes else 0
    )
    told = write_all(backend_of(graphs_of(encodes=encodes)), prompts, 5)
    found = write_all(backend, prompts, 5)
    assert all(found[n].tokens == told[n].tokens for n in range(8))


def test_a_tied_table_is_turned_where_it_is_read() -> None:
    table = VOCABULARY * WIDTH * 4
    source = onnx.load_from_string(exported()["model.onnx"])
    copies = [t for t in source.graph.initializer if sorted(t.dims) == [WIDTH, VOCABULARY]]
    assert len(copies) == 2  # the exporter turned it for the head
    graphs = graphs_of()
    held = [
        [t for t in onnx.load_from_string(graphs.graphs[name]).graph.initializer
         if len(t.raw_data) == table]
        for name in ("stages/00.onnx", "head.onnx")
    ]  # fmt: skip
    assert [len(found) for found in held] == [1, 1]
    assert held[0][0].raw_data == held[1][0].raw_data


def test_weights_of_several_graphs_are_named_in_one_file(tmp_path: Path) -> None:
    model, graphs = with_large_head()
    bundle = write_generating_bundle(tmp_path / "text.ee", model, graphs)
    size = (bundle.path / WEIGHTS).stat().st_size
    named = [p for n in model.graphs for p in named_weights(bundle.graph(n), size)]
    assert len(named) == 2  # in the first stage and in the head
    assert len(set(named)) == 1
    assert size == 4096 * WIDTH * 4
    backend = OnnxTextBackend.of(bundle, slots=1, length=4)
    backend.open(0, drawn_prompts(1)[0][:1])
    assert backend.run(0, [0]).tokens.shape == (1,)


def with_large_head() -> tuple[TextModel, dict[str, bytes]]:
    """The decoder with a table of 4,096 words, in the place of 40."""
    graphs = graphs_of()
    made = {}
    for name, content in graphs.graphs.items():
        proto = onnx.load_from_string(content)
        for tensor in proto.graph.initializer:
            if list(tensor.dims) == [VOCABULARY, WIDTH]:
                tensor.dims[0] = 4096
                tensor.raw_data = (tensor.raw_data * 103)[: 4096 * WIDTH * 4]
        made[name] = proto.SerializeToString()
    return replace(graphs.model, vocabulary=4096), made


def _rehashed(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    told = json.loads((path / GENERATION).read_bytes())
    change(told)
    document = json.dumps(told).encode()
    (path / GENERATION).write_bytes(document)
    (path / GENERATION_HASH).write_text(f"{hashlib.sha256(document).hexdigest()}\n")


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "error", "facts"),
    [
        (lambda p: _flip(p / "stages/01.onnx"), BundleIntegrityError, r"stages/01\.onnx was alt"),
        (lambda p: _flip(p / "head.onnx"), BundleIntegrityError, r"head\.onnx was altered"),
        (lambda p: (p / TOKENIZER).unlink(), BundleIntegrityError, r"tokenizer\.json"),
        (lambda p: (p / TOKENIZER).write_bytes(b"{ }"), BundleIntegrityError, "has 3 bytes.* 2"),
        (lambda p: _flip(p / GENERATION), BundleIntegrityError, r"generation\.json or"),
        (lambda p: (p / GENERATION_HASH).unlink(), BundleIntegrityError, r"generation\.sha256"),
        (lambda p: (p / "more").touch(), BundleIntegrityError, "more does not belong"),
        (lambda p: (p / GENERATION).unlink(), BundleNotFoundError, "not a generating bundle"),
        (shutil.rmtree, BundleNotFoundError, "not a generating bundle"),
        (
            lambda p: _rehashed(p, lambda told: told.update(schema_version=2)),
            BundleSchemaError,
            "schema version 2, but this Offramp reads 1",
        ),
        (
            lambda p: _rehashed(p, lambda told: told["files"].pop(0)),
            BundleSchemaError,
            r"absent: \['head\.onnx'\]",
        ),
        (
            lambda p: _rehashed(p, lambda told: told["model"].update(stop_tokens=[VOCABULARY])),
            BundleSchemaError,
            r"\[40\] must be in the vocabulary, 0 to 39",
        ),
        (
            lambda p: _rehashed(p, lambda told: told["model"]["stages"][0].update(threshold=None)),
            BundleSchemaError,
            "each stage but the last needs a threshold",
        ),
        (
            lambda p: _rehashed(p, lambda told: told["model"]["stages"][0].update(threshold=-1.0)),
            BundleSchemaError,
            r"threshold has -1\.0",
        ),
        (
            lambda p: _rehashed(p, lambda told: told["model"]["stages"].pop()),
            BundleSchemaError,
            r"after layers \[1, 3\].* 4",
        ),
        (
            lambda p: _rehashed(p, lambda told: told["model"].update(kind="encoder-decoder")),
            BundleSchemaError,
            "must have an encoder",
        ),
    ],
)  # fmt: skip
def test_a_damaged_bundle_is_refused_by_name(
    tmp_path: Path, damage: Callable[[Path], None], error: type[Exception], facts: str
) -> None:
    path = tmp_path / "text.ee"
    written(path)
    damage(path)
    with pytest.raises(error, match=facts):
        GeneratingBundle.open(path)


def test_a_bundle_without_its_manifest_is_one_that_lacks_a_file(tmp_path: Path) -> None:
    path = tmp_path / "text.ee"
    written(path)
    (path / GENERATION).unlink()
    assert EXTENSION.opens(path)
    with pytest.raises(BundleNotFoundError, match=r"no generation\.json there.*compile the model"):
        GeneratingBundle.open(path)
    (path / GENERATION_HASH).unlink()
    assert not EXTENSION.opens(path)


def test_weights_that_change_after_the_opening_are_refused(tmp_path: Path) -> None:
    bundle = write_generating_bundle(tmp_path / "text.ee", *with_large_head())
    _flip(bundle.path / WEIGHTS)
    with pytest.raises(BundleIntegrityError, match=r"weights\.bin was altered"):
        bundle.weight_folder()
    with pytest.raises(BundleIntegrityError, match=r"weights\.bin was altered"):
        GeneratingBundle.open(bundle.path)


def test_nothing_but_a_generating_bundle_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "text.ee"
    path.mkdir()
    (path / "manifest.json").touch()
    with pytest.raises(BundleExistsError, match="is not a generating bundle"):
        written(path)
    shutil.rmtree(path)
    written(path)
    with pytest.raises(BundleExistsError, match="--overwrite"):
        written(path)
    _flip(path / "head.onnx")
    graphs = graphs_of(encodes=True)
    write_generating_bundle(path, graphs.model, graphs.graphs, overwrite=True)
    assert GeneratingBundle.open(path).model.kind == "encoder-decoder"
    assert GeneratingBundle.open(path).tokenizer() is None


def test_a_writing_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "text.ee"
    bundle = written(path)

    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing, "put_in_place", refuse)
    graphs = graphs_of(encodes=True)
    with pytest.raises(BundleWriteError, match="No space left on device"):
        write_generating_bundle(path, graphs.model, graphs.graphs, overwrite=True)
    assert GeneratingBundle.open(path) == bundle
    assert [p.name for p in tmp_path.iterdir()] == ["text.ee"]


def test_a_model_without_its_graphs_is_no_bundle(tmp_path: Path) -> None:
    graphs = graphs_of()
    some = {name: content for name, content in graphs.graphs.items() if name != "head.onnx"}
    with pytest.raises(ValueError, match=r"not given: \['head\.onnx'\]"):
        write_generating_bundle(tmp_path / "text.ee", graphs.model, some)
    assert not list(tmp_path.iterdir())
    assert graphs.model.layers_of(LAYERS - 2) == range(3, LAYERS)
