"""Models compiled as cascades: who answers what, against float32 and int8 run by themselves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from tests import models
from tests.bundles import compile_tiny, sharing_weights
from tests.integration.test_compile_tiny import Arrays, answers, images, run, sentences, vectors
from tests.marks import slow_but
from tests.part_sizes import check_part_sizes
from tests.quantised import Rounded, quantised
from tests.unit.engine.serving import until

from offramp.bundle import NEVER, ActiveExit, Bundle, CpuFeatures, ExitPolicy, write_bundle
from offramp.calibration.data.dataset import Dataset
from offramp.calibration.measure import profiling
from offramp.calibration.precision.choice import KindMeasured, PrecisionChoice
from offramp.calibration.precision.kinds import CpuPrecision
from offramp.calibration.precision.quantised_graphs import BatchDependence
from offramp.certify.decision import MODEL_END
from offramp.compiler.commands.cli import main
from offramp.compiler.common.errors import EngineOptionsError, ExportError
from offramp.compiler.common.options import ProfileOptions, RehearseOptions
from offramp.compiler.engines.build import BuildOptions, build_bundle
from offramp.compiler.engines.build_options import EngineBuildOptions
from offramp.compiler.exits.timed_model import CompileRun
from offramp.compiler.export.export import ExportOptions, export_bundle
from offramp.compiler.graphs.source_model import SourceModel
from offramp.compiler.steps.profile import profile_bundle
from offramp.compiler.steps.rehearse import rehearse_bundle
from offramp.engine.backends import make_backend
from offramp.engine.backends.onnxruntime import make_session
from offramp.engine.common.environment import cpu_features
from offramp.engine.control.controller import ControlStatus
from offramp.engine.core import Engine
from offramp.engine.models import served_model
from offramp.engine.models.deployment import DeploymentMaker
from offramp.engine.models.options import EngineOptions, ModelOptions
from offramp.engine.requests.results import ResultKind
from offramp.engine.self_check import CheckVerdict, run_self_check
from offramp.engine.stages.plan import Mode, make_plan

MODELS = {
    "residual": (models.residual_cnn, images),
    "bert": (models.bert_like, sentences),
    "mlp": (models.mlp, vectors),
}
ROWS = 90
NO_KIND = PrecisionChoice(
    kind=None,
    reason="float32 stays",
    measured=(),
    not_applicable={},
    disturbed=(),
)


class Compiled(NamedTuple):
    bundle: Bundle
    copy: bytes
    """The quantised model as it was made."""
    unseen: Arrays
    data: Path


class Keeping:
    """Quantises as the compiler does by default, and keeps the copy."""

    def __init__(self) -> None:
        self.copy = b""

    def __call__(self, model: SourceModel, samples: Dataset) -> bytes:
        self.copy = quantised(model, samples)
        return self.copy


def time_ms(timed: profiling.TimedGraph, _tensors: object) -> float:
    """The source model takes 1 ms, all else a quarter."""
    outputs = [output.name for output in timed.session.get_outputs()]
    whole = len(outputs) == 1 and outputs[0] in ("probabilities", "logits")
    return 1.0 if whole else 0.25


@pytest.fixture(scope="module")
def fast_copies() -> Iterator[None]:
    """Make copies four times as fast as their model, independent of the machine."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(profiling.TimedGraph, "time_ms", time_ms)
        patched.setattr(profiling, "_staged_ms", lambda *_: 1.25)
        patched.setattr(profiling, "disturbances", lambda *_: ())
        yield


@pytest.fixture(scope="module", params=slow_but(["mlp"], MODELS))
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, fast_copies: None
) -> Compiled:
    build, data = MODELS[request.param]
    folder, keeping = tmp_path_factory.mktemp(request.param), Keeping()
    bundle = compile_tiny(
        build(),
        data(),
        folder,
        own_times=True,
        candidates=3,
        precision="int8",
        max_overhead=None,
        quantise=keeping,
    )
    unseen = data(ROWS, seed=1)
    unseen.pop("label", None)
    return Compiled(Bundle.open(bundle.path), keeping.copy, unseen, folder / "data.npz")


def by_graph(graph: bytes, tensors: Arrays, size: int = 30) -> NDArray[Any]:
    """Answers of a whole model, in the batches of :func:`run`."""
    session = make_session(graph, 1)
    read = [tensor.name for tensor in session.get_inputs()]
    starts = range(0, ROWS, size)
    batches = ({name: tensors[name][start : start + size] for name in read} for start in starts)
    return np.concatenate([session.run(None, batch)[0] for batch in batches])


def of_source(found: Compiled) -> NDArray[Any]:
    return by_graph(found.bundle.read("source.onnx"), found.unseen)


def own_exit(bundle: Bundle) -> int:
    return len(bundle.manifest.exits) - 1


def policy(*active: tuple[int, float]) -> ExitPolicy:
    exits = tuple(ActiveExit(exit=exit_, threshold=threshold) for exit_, threshold in active)
    return ExitPolicy(version=2, active=exits)


def test_the_bundle_says_what_it_is(compiled: Compiled) -> None:
    manifest = compiled.bundle.manifest
    assert manifest.precision == "int8"
    assert manifest.cpu == cpu_features()
    assert manifest.segments[-1].file == manifest.source.file
    assert manifest.exits[-1].head.kind == "own"
    assert 0.9 < manifest.exits[-1].agreement <= 1
    report = (compiled.bundle.path / "report.html").read_text()
    assert "whose own answer is the last exit" in report
    assert f"certified on a CPU of {manifest.cpu.describe()}" in report
    assert "the copy&#39;s own answer" in report
    profile = compiled.bundle.profile()
    assert profile.segments_ms[-1] == profile.source_ms == (1.0,) * len(profile.batch_sizes)
    assert np.sum(profile.segments_ms[:-1], axis=0).tolist() == pytest.approx([0.25] * 6)


def test_the_sizes_are_those_of_the_copy_and_the_source(compiled: Compiled) -> None:
    check_part_sizes(compiled.bundle)
    *_, behind, last = compiled.bundle.manifest.segments
    given = sum(array[:1].nbytes for array in compiled.unseen.values())
    assert behind.row_bytes == given, "the source begins anew, with the model's inputs"
    assert last.file == "source.onnx"


def test_the_int8_models_own_answer_is_in_use_and_certified(compiled: Compiled) -> None:
    promise = compiled.bundle.policy.promise
    assert promise is not None
    assert promise.certify_errors <= 0.05 * promise.certify_samples
    assert promise.predicted_savings > 0.3
    assert compiled.bundle.policy.active


def test_records_hold_the_float32_models_answers_against_the_int8_ones(compiled: Compiled) -> None:
    """Samples have no fixed order: so classes are counted, over all samples except the training
    ones.
    """
    records = compiled.bundle.records()
    agrees = (records["prediction"] == records["final_prediction"]).mean(axis=1)
    certify = records["split"] == 2
    said = (records["prediction"][-1] == records["final_prediction"])[certify].mean()
    assert said == pytest.approx(compiled.bundle.manifest.exits[-1].agreement)
    assert agrees[-1] > 0.9


def test_who_takes_no_exit_has_the_float32_models_answer_to_the_bit(compiled: Compiled) -> None:
    """All exits run in shadow mode, so that all of the quantised model has run before."""
    in_shadow_mode = policy(*((e.index, NEVER) for e in compiled.bundle.manifest.exits))
    plan = make_plan(compiled.bundle, in_shadow_mode, Mode.AUDIT)
    assert len(plan.stages) == len(compiled.bundle.manifest.exits) + 1
    np.testing.assert_array_equal(answers(plan, compiled.unseen), of_source(compiled))


def test_who_takes_the_own_exit_has_the_int8_answer(compiled: Compiled) -> None:
    plan = make_plan(compiled.bundle, policy((own_exit(compiled.bundle), 0.0)))
    found = answers(plan, compiled.unseen)
    wanted = by_graph(compiled.copy, compiled.unseen)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=0.02 * np.abs(wanted).max())
    assert (found != of_source(compiled)).any()
    assert (found.argmax(axis=1) == of_source(compiled).argmax(axis=1)).mean() > 0.9


def test_each_answer_is_that_of_the_stage_that_the_sample_left_at(compiled: Compiled) -> None:
    bundle, unseen = compiled.bundle, compiled.unseen
    medians = np.median(bundle.records()["confidence"], axis=1)
    chosen = sorted({0, own_exit(bundle)})
    plan = make_plan(bundle, policy(*((e, float(medians[e])) for e in chosen)))
    own = answers(make_plan(bundle, policy((own_exit(bundle), 0.0))), unseen)
    first = answers(make_plan(bundle, policy((chosen[0], 0.0))), unseen)
    wanted = [first, own, of_source(compiled)] if len(chosen) == 2 else [own, of_source(compiled)]
    left = dict.fromkeys(range(len(wanted)), 0)
    for stage, row, answer in run(plan, unseen):
        left[stage] += 1
        np.testing.assert_allclose(answer, wanted[stage][row], rtol=0, atol=1e-5)
    assert left[0] > 0
    assert left[len(wanted) - 1] > 0


def test_mode_off_is_the_source_model(compiled: Compiled) -> None:
    plan = make_plan(compiled.bundle, mode=Mode.OFF)
    (stage,) = plan.stages
    assert stage.load() == compiled.bundle.read("source.onnx")
    np.testing.assert_array_equal(answers(plan, compiled.unseen), of_source(compiled))


def test_weights_of_integers_are_mapped_too(compiled: Compiled, tmp_path: Path) -> None:
    """Borders that carry steps, and int8 segments next to the model, have bit-identical answers."""
    bundle = sharing_weights(compiled.bundle, tmp_path / "named.ee")
    medians = np.median(compiled.bundle.records()["confidence"], axis=1)
    active = policy(*((e, float(medians[e])) for e in sorted({0, own_exit(bundle)})))
    plan, wanted = make_plan(bundle, active), make_plan(compiled.bundle, active)
    for stage in plan.stages:
        graph, folder = stage.load_light()
        assert folder == bundle.path.resolve()
        assert len(graph) < len(stage.load())
    found, expected = run(plan, compiled.unseen), run(wanted, compiled.unseen)
    for (stage_a, row_a, a), (stage_b, row_b, b) in zip(found, expected, strict=True):
        assert (stage_a, row_a) == (stage_b, row_b)
        np.testing.assert_array_equal(a, b)


def test_what_is_released_is_followed_by_the_float32_models_answer(compiled: Compiled) -> None:
    """The controller receives both: audits judge agreement with the float32 model."""
    source = of_source(compiled)
    options = EngineOptions(
        mode=Mode.RELEASE, keep_state=False, defaults=ModelOptions(max_batch_size=30)
    )

    async def serve() -> None:
        early = disagreed = 0
        async with await Engine.open({"m": compiled.bundle.path}, options) as engine:
            for start in range(0, ROWS, 30):
                rows = {name: a[start : start + 30] for name, a in compiled.unseen.items()}
                results = [result async for result in engine.infer_stream("m", rows)]
                first, final = (next(iter(results[i].outputs.values())) for i in (0, -1))
                assert results[0].kind is ResultKind.EARLY
                assert results[-1].exits.tolist() == [MODEL_END] * 30
                wanted = source[start : start + 30]
                np.testing.assert_allclose(final, wanted, rtol=0, atol=1e-6)
                left = results[0].exits != MODEL_END
                early += int(left.sum())
                disagreed += int((first.argmax(axis=1) != wanted.argmax(axis=1))[left].sum())

            def control() -> ControlStatus:
                status = engine.statistics()["m"].control
                assert status is not None
                return status

            await until(lambda: control().observed == ROWS)
            assert (control().audited, control().disagreed) == (early, disagreed)
            assert early > 0

    asyncio.run(asyncio.wait_for(serve(), 120))


def test_loading_it_where_int8_saturates_is_warned_of(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here = CpuFeatures(machine="x86_64", names=("AVX2",))
    there = replace(here, names=("AVX512_VNNI",))
    manifest = replace(compiled.bundle.manifest, cpu=there, weights_of_7_bits=False)
    opened = replace(compiled.bundle, manifest=manifest)
    monkeypatch.setattr(served_model, "cpu_features", lambda: here)
    monkeypatch.setattr(Bundle, "open", lambda _: opened)
    options = EngineOptions(keep_state=False, defaults=ModelOptions(max_batch_size=2))

    async def load() -> None:
        async with await Engine.open({"m": compiled.bundle.path}, options):
            pass

    asyncio.run(asyncio.wait_for(load(), 120))
    (warning,) = (r for r in caplog.records if "INT8 MAY ANSWER OTHERWISE HERE" in r.message)
    assert (warning.levelno, warning.message[:3]) == (logging.WARNING, "m: ")


def test_stages_of_one_unit_that_carry_other_tensors_are_not_confused(compiled: Compiled) -> None:
    """The first exit alone carries no cut tensor; before the own exit it does."""
    bundle = compiled.bundle
    if len(bundle.manifest.exits) < 2:
        pytest.skip("needs two exits")
    backend = make_backend("onnxruntime")
    maker = DeploymentMaker(
        bundle,
        backend,
        bundle.profile(),
        mode=Mode.LEAVE,
        options=ModelOptions(max_batch_size=30),
    )
    slot = backend.open_slot()
    for active in ([(0, 1.5)], [(0, 1.5), (own_exit(bundle), 1.5)], [(0, 1.5)]):
        deployment = maker.make(policy(*active))
        departures = list(deployment.pipeline.run(slot, compiled.unseen))
        (end,) = departures
        assert end.stage == len(active)
    slot.close()


def test_it_is_profiled_anew_and_rehearsed(
    compiled: Compiled, tmp_path: Path, fast_copies: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = CpuFeatures(machine="another", names=("DOTPROD",))
    monkeypatch.setattr("offramp.compiler.steps.rehearse.cpu_features", lambda: elsewhere)
    again = profile_bundle(ProfileOptions(bundle=compiled.bundle.path, output=tmp_path / "p.ee"))
    assert again.after.segments_ms == pytest.approx(np.array(again.before.segments_ms))
    profiled = Bundle.open(tmp_path / "p.ee").manifest
    assert (profiled.precision, profiled.cpu) == ("int8", compiled.bundle.manifest.cpu)
    with np.load(compiled.data) as archive:
        np.savez(tmp_path / "reversed.npz", **{k: archive[k][::-1] for k in archive.files})
    options = RehearseOptions(
        bundle=compiled.bundle.path, data=tmp_path / "reversed.npz", output=tmp_path / "r.ee"
    )
    done = rehearse_bundle(options)
    assert done.rehearsed.shipped.source_ms == pytest.approx(1.0)
    anew = rehearse_bundle(replace(options, from_scratch=True, dry_run=True))
    assert anew.rehearsed.rehearsal.steps
    rehearsed = Bundle.open(tmp_path / "r.ee").manifest
    assert rehearsed.segments == compiled.bundle.manifest.segments
    assert rehearsed.cpu == elsewhere, "which certified it again"


def test_it_is_exported_as_one_file(compiled: Compiled, tmp_path: Path) -> None:
    """Exporting compares exits and answers with the bundle's on every sample."""
    medians = np.median(compiled.bundle.records()["confidence"], axis=1)
    active = policy(*((i, float(c)) for i, c in enumerate(medians)))
    bundle = with_policy(compiled.bundle, active, tmp_path / "all.ee")
    output = tmp_path / "fast.onnx"
    done = export_bundle(
        ExportOptions(bundle=bundle.path, data=compiled.data, output=output, with_exits=True)
    )
    assert done.verified.samples > 1000
    assert 0 < done.verified.exit_shares[MODEL_END] < 1
    assert done.verified.exit_shares[0] > 0


def with_policy(bundle: Bundle, active: ExitPolicy, path: Path) -> Bundle:
    kept = {e.path: bundle.read(e.path) for e in bundle.manifest.files}
    kept.pop("policy.json")
    return write_bundle(path, bundle.manifest, active, kept)


def test_the_self_check_passes(compiled: Compiled, tmp_path: Path) -> None:
    """Stages that pass on integers are included."""
    medians = np.median(compiled.bundle.records()["confidence"], axis=1)
    active = policy(*((i, float(c)) for i, c in enumerate(medians)))
    bundle = with_policy(compiled.bundle, active, tmp_path / "all.ee")
    options = EngineOptions(mode=Mode.AUDIT, defaults=ModelOptions(max_batch_size=8))
    report = run_self_check({"m": bundle.path}, options, seconds=1.0)
    failed = [r for r in report.results if r.verdict is CheckVerdict.FAILED]
    assert failed == []
    assert "carry" in {r.name for r in report.results if r.verdict is CheckVerdict.PASSED}


def of_another_opset(model: SourceModel, samples: Dataset) -> bytes:
    proto = onnx.ModelProto.FromString(Rounded(bits=6)(model, samples))
    proto.opset_import[0].version = 18
    return proto.SerializeToString()


def test_a_copy_of_another_opset_serves_but_makes_no_file(
    tmp_path: Path, fast_copies: None
) -> None:
    bundle = compile_tiny(
        models.mlp(),
        vectors(),
        tmp_path,
        epochs=2,
        precision="int8",
        max_overhead=None,
        quantise=of_another_opset,
    )
    assert bundle.policy.active
    in_shadow_mode = policy(*((e.index, NEVER) for e in bundle.manifest.exits))
    unseen = vectors(ROWS, seed=1)
    found = answers(make_plan(bundle, in_shadow_mode, Mode.AUDIT), unseen)
    np.testing.assert_array_equal(found, by_graph(bundle.read("source.onnx"), unseen))
    options = ExportOptions(
        bundle=bundle.path, data=tmp_path / "data.npz", output=tmp_path / "fast.onnx"
    )
    with pytest.raises(ExportError, match=r"opsets \[17, 18\].*--precision fp32"):
        export_bundle(options)
    assert not options.output.exists()


def test_no_engines_are_built_of_it(compiled: Compiled) -> None:
    options = BuildOptions(bundle=compiled.bundle.path, engines=EngineBuildOptions(), dry_run=True)
    with pytest.raises(EngineOptionsError, match="compile it with --precision fp32"):
        build_bundle(options)


def test_the_command_line_makes_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture, fast_copies: None,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    kind = "offramp.compiler.blueprints.precision_choice.fastest_kind"

    def fastest(model: SourceModel, run: CompileRun) -> PrecisionChoice:
        copy = quantised(model, run.parts.train)
        measured = KindMeasured(
            kind=CpuPrecision.STATIC,
            ratios={},
            agreement=1.0,
            samples=100,
            dependence=BatchDependence(rows=16, changed=0, difference=0.0),
            size_bytes=len(copy),
        )
        return replace(
            NO_KIND,
            kind=CpuPrecision.STATIC,
            measured=(measured,),
            graphs={CpuPrecision.STATIC: copy},
        )

    monkeypatch.setattr(kind, fastest)
    onnx.save(models.mlp(), "model.onnx")
    np.savez("data.npz", **vectors())
    command = ["model.onnx", "--data", "data.npz", "--epochs", "2", "--max-disagreement", "0.05"]
    assert main([*command, "--precision", "int8"]) == 0
    said = capsys.readouterr().out
    assert "Precision int8: exits follow" in said
    assert "exits alone are predicted to save" in said
    assert Bundle.open("model.ee").manifest.precision == "int8"
    monkeypatch.setattr(kind, lambda *_: NO_KIND)
    assert main([*command, "--overwrite", "--precision", "int8"]) == 0
    assert Bundle.open("model.ee").manifest.precision == "fp32"
    said = capsys.readouterr()
    assert "Precision fp32. Chosen here: float32 stays\n" in said.out
    nothing = "PRECISION int8 BRINGS NOTHING HERE, the bundle will be of fp32: float32 stays."
    assert caplog.messages.count(nothing) == 1
    assert "float32 stays" in Path("model.ee/report.html").read_text()
    assert main([*command, "--overwrite", "--precision", "auto"]) == 0
    said = capsys.readouterr()
    assert "Precision fp32. Chosen here: float32 stays\n" in said.out
    assert caplog.messages.count(nothing) == 1, "not said again"
    assert main([*command, "--overwrite", "--precision", "fp32"]) == 0
    assert "Precision" not in capsys.readouterr().out
    assert Bundle.open("model.ee").manifest.precision == "fp32"
