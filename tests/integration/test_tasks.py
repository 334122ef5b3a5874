"""Answers that are more than one class: compiled, served, audited, and called by stock clients."""

from __future__ import annotations

import asyncio
import dataclasses
import html
import io
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from rich.console import Console
from tests import models
from tests.bundles import compile_tiny
from tests.facts import facts
from tests.loopback import MODEL, ask, check, serving
from tests.marks import slow_but
from tests.padded import Arrays, answers
from tests.sliced import slice_proto, timed
from tests.tasks import CASES, SAMPLES, compiled, images

from offramp.bundle import ActiveExit, Bundle, ExitPolicy, write_bundle
from offramp.calibration.data.dataset import Dataset, split
from offramp.calibration.torch import torch_graph
from offramp.calibration.torch.bridge_training import TrainedBridge
from offramp.certify import MODEL_END
from offramp.compiler.commands.printing import print_bundle
from offramp.compiler.common.options import CompileOptions
from offramp.compiler.exits.bridges import BridgeSearch, bridges_of
from offramp.compiler.steps.bundle_check import VerifyOptions, verify_bundle
from offramp.engine.answers.agreement import agreement_of
from offramp.engine.stages.plan import Mode


@pytest.fixture(scope="module", params=slow_but(["regression", "segmentation"], sorted(CASES)))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a bundle of each task, with all exits in use; every timed run takes 1 ms."""
    build, data, options = CASES[request.param]
    folder = tmp_path_factory.mktemp("task")
    bundle = compiled(build, data, folder, **options)
    assert bundle.manifest.exits, "a tiny model learns something"
    return bundle, with_all_exits(bundle, data(200, seed=7), folder / "all.ee"), data, folder


def between(confidence: np.ndarray) -> float:
    """The middle of the widest gap around the median."""
    middle = np.sort(confidence)[len(confidence) // 4 : -len(confidence) // 4]
    place = int(np.diff(middle).argmax())
    return float(middle[place : place + 2].mean())


def with_all_exits(bundle: Bundle, inputs: Arrays, path: Path) -> Bundle:
    """Return the bundle with a policy by which half of the samples may leave at every exit.

    Thresholds are between two confidences: rounding in other batches must not decide.
    """
    said = answers(bundle, inputs)
    active = tuple(
        ActiveExit(exit=e.index, threshold=between(said[e.confidence]))
        for e in bundle.manifest.exits
    )
    content = {e.path: bundle.read(e.path) for e in bundle.manifest.files}
    policy = ExitPolicy(version=1, active=active, promise=bundle.policy.promise)
    return write_bundle(path, bundle.manifest, policy, content)


def test_the_manifest_says_what_an_answer_is(made: Any, request: pytest.FixtureRequest) -> None:
    bundle, *_ = made
    (name,) = (p for p in CASES if f"[{p}]" in request.node.name)
    task = bundle.manifest.answer.task
    assert task.kind == ("segmentation" if "pixel" in name else name)
    assert task.mask == ("attention_mask" if name == "token-classification" else None)
    assert (name == "classification") or task.describe() in html.unescape(
        bundle.read("report.html").decode()
    )
    early = task.kind == "segmentation" and bundle.policy.active
    assert ("A few answers to look at" in bundle.read("report.html").decode()) == bool(early)
    kinds = {e.head.kind for e in bundle.manifest.exits}
    assert (
        kinds == {"bridge"} if task.is_dense or name == "classification" else "bridge" not in kinds
    )


def test_recorded_answers_agree_where_a_comparison_says_so(made: Any) -> None:
    """The records of the certify split are what comparing answers by hand gives."""
    bundle, _, data, _ = made
    records, answer = bundle.records(), bundle.manifest.answer
    agreement, inputs = agreement_of(answer), data(300, seed=3)
    said = answers(bundle, inputs)
    ends = agreement.reduce(said[answer.output])
    for exit_ in bundle.manifest.exits:
        agrees = agreement.agree(
            agreement.reduce(said[exit_.output]), ends, agreement.mask_in(inputs)
        )
        recorded = records["prediction"][exit_.index] == records["final_prediction"]
        assert recorded.mean() == pytest.approx(agrees.mean(), abs=0.15)


def test_verify_counts_answers_that_do_not_agree(made: Any) -> None:
    _, bundle, data, folder = made
    inputs = data(256, seed=5)
    np.savez(folder / "unseen.npz", **inputs)
    found = verify_bundle(VerifyOptions(bundle=bundle.path, data=folder / "unseen.npz"))
    assert found.samples == 256
    assert found.end_difference < 1e-4
    assert len(found.shares) == len(bundle.manifest.exits) + 1


def test_served_answers_are_those_of_exits_and_model(made: Any) -> None:
    _, bundle, data, _ = made
    inputs = data(60, seed=11)

    async def go() -> None:
        async with serving(bundle) as (_, client):
            parts = [{k: v[i : i + 5] for k, v in inputs.items()} for i in range(0, 60, 5)]
            for part, result in zip(parts, await ask(client, parts), strict=True):
                check(bundle, part, result)

    asyncio.run(go())


def test_audits_compare_as_the_task_says(made: Any) -> None:
    _, bundle, data, _ = made
    inputs, answer = data(160, seed=13), bundle.manifest.answer
    agreement = agreement_of(answer)

    async def go() -> Any:
        async with serving(bundle, Mode.RELEASE, controller="certified") as (engine, client):
            parts = [{k: v[i : i + 8] for k, v in inputs.items()} for i in range(0, 160, 8)]
            results = await ask(client, parts)
            for _ in range(200):
                control = engine.statistics()[MODEL].control
                if control is not None and control.observed >= 160:
                    break
                await asyncio.sleep(0.05)
            return results, control

    results, control = asyncio.run(go())
    said = np.concatenate([r.outputs[answer.output] for r in results])
    early = np.concatenate([r.exits for r in results]) >= 0
    ends = agreement.reduce(answers(bundle, inputs)[answer.output])
    agrees = agreement.agree(agreement.reduce(said), ends, agreement.mask_in(inputs))
    assert control.audited == early.sum()
    assert abs(control.disagreed - (~agrees[early]).sum()) <= 1  # rounding in other batches


def test_a_stock_client_gets_the_shape_that_the_model_has(made: Any) -> None:
    _, bundle, data, _ = made
    (output,), inputs = bundle.manifest.outputs, data(3, seed=17)

    async def go() -> Any:
        async with serving(bundle) as (_, client):
            metadata = await client.metadata(MODEL)
            return metadata, await client.infer(MODEL, inputs)

    metadata, result = asyncio.run(go())
    shape = result.outputs[output.name].shape
    told = metadata.outputs[output.name].shape
    assert len(shape) == len(told) == len(output.shape)
    assert all(t in (-1, s) for t, s in zip(told[1:], shape[1:], strict=True))
    assert result.outputs[output.name].dtype == output.dtype


def test_an_exit_reads_the_mask_that_its_confidence_counts_by(tmp_path: Path) -> None:
    """Bridges of these encoders get it from the blocks that they keep; the exit says so itself."""
    build, data, options = CASES["token-classification"]
    pieces = slice_proto(build(), **options)
    answer = pieces.model.answer
    task = dataclasses.replace(answer.task, mask="attention_mask")
    model = dataclasses.replace(pieces.model, answer=dataclasses.replace(answer, task=task))
    pieces = dataclasses.replace(pieces, model=model)
    asked = CompileOptions.of(model=tmp_path, data=tmp_path, output=tmp_path)
    parts = split(Dataset(inputs=data(400), labels=None, sha256=""), certify_at_least=100, seed=0)
    search = BridgeSearch(timed(pieces, parts, asked), b"")
    bridges = [b for b in bridges_of(pieces) if "attention_mask" not in b.reads]
    assert bridges, "behind the last attention nothing reads the mask"
    for bridge in bridges:
        trained = TrainedBridge(
            proto=bridge.proto,
            principal=np.ones((len(parts.tune), 12), np.float32),
            agrees=np.ones(len(parts.tune), np.bool_),
            losses=[0.0],
        )
        built = search.judged(bridge, trained, 1.0)
        session = ort.InferenceSession(built.graph)
        assert {tensor.name for tensor in session.get_inputs()} == set(built.reads)


def test_of_both_families_the_one_that_nets_more_is_taken(tmp_path: Path) -> None:
    bundle = compiled(models.residual_cnn, images, tmp_path, heads="both", epochs=1)
    assert bundle.manifest.exits
    for exit_ in bundle.manifest.exits:
        kinds = {trial.head.kind for trial in exit_.trials}
        assert "bridge" in kinds
        assert len(kinds) > 1
        best = max(exit_.trials, key=lambda trial: trial.net_savings)
        assert exit_.head == best.head


def test_precisions_are_for_classification(tmp_path: Path) -> None:
    from offramp.compiler.common.errors import ModelError

    build, data, options = CASES["segmentation"]
    with pytest.raises(
        ModelError, match=facts("--precision int8", "classification", "segmentation")
    ):
        compile_tiny(build(), data(SAMPLES), tmp_path, precision="int8", **options)


def test_dataclasses_are_not_lost(made: Any) -> None:
    """The task survives the file."""
    bundle, *_ = made
    assert dataclasses.asdict(Bundle.open(bundle.path).manifest.answer) == dataclasses.asdict(
        bundle.manifest.answer
    )


@pytest.mark.parametrize("name", ["token-classification", "segmentation", "pose"])
def test_exits_of_answers_with_places_are_certified_and_answer(tmp_path: Path, name: str) -> None:
    """A random model can meet the terms: there is a promise, and samples leave at its exits."""
    build, data, options = CASES[name]
    loose = {"agree_share": 0.1, "max_disagreement": 0.4}
    if name == "pose":
        loose["agree_within"] = 0.5
    bundle = compiled(build, data, tmp_path, **{**options, **loose})
    policy, promise = bundle.policy, bundle.policy.promise
    assert policy.active
    assert promise is not None
    assert promise.certify_errors / promise.certify_samples < 0.4
    page = bundle.read("report.html").decode()
    assert ("A few answers to look at" in page) == (name == "segmentation")
    written = io.StringIO()
    print_bundle(bundle, Console(file=written, width=400))
    told = f"Task: {name} (--task names another); an answer agrees if "
    assert told + bundle.manifest.answer.task.describe() in written.getvalue()

    async def go() -> Any:
        async with serving(bundle) as (_, client):
            return await client.infer(MODEL, inputs)

    inputs = data(200, seed=19)
    result = asyncio.run(go())
    assert set(result.exits.tolist()) - {MODEL_END} == {active.exit for active in policy.active}
    check(bundle, inputs, result)


def test_without_operators_for_bridges_heads_pool_where_both_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(torch_graph.OPERATORS, "Relu")
    bundle = compiled(models.residual_cnn, images, tmp_path, heads="both", epochs=1)
    assert {e.head.kind for e in bundle.manifest.exits} == {"grid"}
    assert "Bridges are left out, and heads pool" in caplog.text
