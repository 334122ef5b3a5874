"""Engines that are built, with reasons, and those that are always kept; with a fake builder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.engines import engine_bundle
from tests.facts import tells
from tests.fake_builder import FakeBuilder
from tests.sliced import inputs_of, sliced

from offramp.bundle import Bundle
from offramp.bundle.engine_index import addressed, model_digest
from offramp.bundle.engines import (
    EngineStore,
    Precision,
    PrecisionEvidence,
    list_targets,
    parts_digest,
)
from offramp.compiler.common.errors import (
    EngineBuildError,
    EngineOptionsError,
    ModelError,
    VerificationError,
)
from offramp.compiler.engines import build
from offramp.compiler.engines.build import BuildOptions, Reports, build_bundle
from offramp.compiler.engines.build_options import EngineBuildOptions, parse_batches, parse_parts
from offramp.compiler.engines.building import Planned, PlannedEngine, outermost
from offramp.compiler.engines.engine_verification import PrecisionData, Recertified, part_data
from offramp.engine.kernels.compilers import KernelCompileError, KernelCompilerNotFoundError
from offramp.engine.kernels.kernel_compilation import source_hash
from offramp.engine.tensorrt.probe import Device

UNITS = ["00-03", "00-01-exit1", "02-03", "00-00-exit0", "01-01-exit1", "02-02", "03-03"]
SOURCE_FIRST = EngineBuildOptions(batches=parse_batches("1,2-4"))


class Bench:
    """A bundle, and a builder for every request."""

    def __init__(self, bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bundle = bundle
        self.builder = FakeBuilder()
        self.lines: list[str] = []
        self.steps: list[tuple[str, int]] = []
        self.cubin: bytes | Exception = b"cubin"
        monkeypatch.setattr(build, "make_builder", lambda device: self.builder)
        monkeypatch.setattr(build, "load_kernels", self.load_kernels)

    def load_kernels(
        self, compute_capability: tuple[int, int], *, driver_version: tuple[int, int] | None
    ) -> bytes:
        self.driver_version = driver_version
        if isinstance(self.cubin, Exception):
            raise self.cubin
        return self.cubin + b" for %d.%d" % compute_capability

    @contextmanager
    def step(self, title: str, total: int) -> Iterator[Any]:
        done: list[int] = []
        yield done.append
        self.steps.append((title, sum(done)))

    def build(
        self, options: EngineBuildOptions = SOURCE_FIRST, **others: Any
    ) -> tuple[dict[str, str], list[str]]:
        """Units with what became of them, and the lines that were said."""
        self.lines.clear()
        self.steps.clear()
        self.builder.builds.clear()
        done = build_bundle(
            BuildOptions(bundle=self.bundle.path, engines=options, **others),
            Reports(progress=self, print_line=self.lines.append),
        )
        assert done.results is not None
        self.done = done
        return {r.unit.name: r.status for r in done.results}, list(self.lines)

    def plan(
        self, options: EngineBuildOptions = SOURCE_FIRST, **others: Any
    ) -> tuple[Planned, ...]:
        self.lines.clear()
        done = build_bundle(
            BuildOptions(bundle=self.bundle.path, engines=options, dry_run=True, **others),
            Reports(progress=self, print_line=self.lines.append),
        )
        assert done.results is None
        return done.planned

    @property
    def store(self) -> EngineStore:
        (target,) = list_targets(self.bundle.path)
        return EngineStore.open(self.bundle.path, target)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Four segments, exits after 0 and 1; that after 1 is in use."""
    return Bench(engine_bundle("mlp", tmp_path / "b.ee"), monkeypatch)


ALL_BUILT = dict.fromkeys(UNITS, "built")
ALL_FRESH = dict.fromkeys(UNITS, "fresh")


def test_all_units_are_built_and_then_fresh(bench: Bench) -> None:
    assert bench.build() == (ALL_BUILT, [])
    assert bench.steps[1] == ("Build 00-03 (1 of 7)", 100)
    assert len(bench.builder.builds) == 7
    assert bench.builder.closed
    assert bench.build() == (ALL_FRESH, [])
    assert bench.builder.builds == []


def test_what_is_stored(bench: Bench) -> None:
    bench.build()
    store = bench.store
    assert store.index.target.folder == "fake-gpu-sm90-trt10.16.0.72-fp32"
    assert [entry.unit for entry in store.index.engines] == sorted(UNITS)
    entry = store.entry("02-03")
    assert entry is not None
    assert [(p.first_batch, p.last_batch) for p in entry.profiles] == [(1, 1), (2, 4)]
    assert entry.profiles[1].inputs["hidden1"].best == (4, 16)
    assert entry.key["batches"] == "1, 2-4"
    assert entry.key["parts"] == parts_digest(bench.bundle.manifest, 2, 3, None)
    assert store.read_kernels(source_hash()) == b"cubin for 9.0"
    built = {b.graph_sha256 for b in bench.builder.builds}
    assert {e.key["graph"] for e in store.index.engines} == built


def test_results_carry_what_was_measured(bench: Bench) -> None:
    bench.builder = FakeBuilder(
        alter=lambda outputs: {n: (a * 1.0001).astype(a.dtype) for n, a in outputs.items()}
    )
    bench.build()
    for result in bench.done.results:
        assert result.error == pytest.approx(1e-4, rel=0.05)
        assert result.entry is not None
        assert result.entry.build_s > 0


def test_the_timing_cache_goes_from_unit_to_unit(bench: Bench) -> None:
    bench.build()
    caches = [b.timing_cache for b in bench.builder.builds]
    assert caches[0] == b""
    for before, after, done in zip(caches, caches[1:], bench.builder.builds, strict=False):
        assert after == before + done.graph_sha256[:8].encode()
    kept = bench.store.read_timing_cache()
    assert kept.startswith(caches[-1])
    bench.build(rebuild=True)
    assert bench.builder.builds[0].timing_cache == kept


def test_a_damaged_timing_cache_is_done_without(bench: Bench) -> None:
    bench.build()
    cache = bench.store.index.timing_cache
    assert cache is not None
    (bench.store.folder / cache.path).write_bytes(b"damaged")
    assert bench.build(rebuild=True)[0] == ALL_BUILT
    assert bench.builder.builds[0].timing_cache == b""


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batches": parse_batches("1,2-8")}, "built for batches 1, 2-4, now it is 1, 2-8"),
        ({"optimization_level": 5}, "built for optimization level 3, now it is 5"),
        ({"workspace_bytes": 2**30},
         "built for workspace all free memory, now it is 1073741824 bytes"),
    ],
)  # fmt: skip
def test_other_settings_are_one_line_for_all(
    bench: Bench, changes: dict[str, Any], said: str
) -> None:
    bench.build()
    options = replace(SOURCE_FIRST, **changes)
    line = f"rebuilding 7 engines (00-03, 00-01-exit1, 02-03, …): {said}"
    assert bench.build(options) == (ALL_BUILT, [line])
    assert bench.build(options) == (ALL_FRESH, [])
    assert bench.builder.builds == []


@pytest.mark.parametrize(
    ("builder", "said"),
    [
        ({"version": "11.4"}, "Fake GPU with TensorRT 11.4, fp32"),
        ({"gpu": "Other GPU"}, "Other GPU with TensorRT 10.16.0.72, fp32"),
    ],
)
def test_another_device_or_version_gets_a_folder_of_its_own(
    bench: Bench, builder: dict[str, str], said: str
) -> None:
    bench.build()
    before = bench.store
    bench.builder = FakeBuilder(**builder)
    path = bench.bundle.path
    line = (
        f"{path}/engines has engines for Fake GPU with TensorRT 10.16.0.72, fp32; this is {said}: "
        "building all engines"
    )
    assert bench.build() == (ALL_BUILT, [line])
    assert len(list_targets(path)) == 2
    assert EngineStore.open(path, before.index.target).index == before.index
    assert bench.build() == (ALL_FRESH, [])


def test_another_precision_needs_no_explanation(bench: Bench) -> None:
    bench.build()
    assert bench.build(replace(SOURCE_FIRST, precision="tf32")) == (ALL_BUILT, [])
    assert len(list_targets(bench.bundle.path)) == 2


def test_a_changed_graph_is_built_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.build()
    of = build.UnitGraphs.of

    def changed(graphs: build.UnitGraphs, unit: Any) -> bytes:
        graph = of(graphs, unit)
        if unit.name == "02-02":
            graph += b"\x32\x00"  # an empty doc string: the same model in other bytes
        return graph

    monkeypatch.setattr(build.UnitGraphs, "of", changed)
    assert bench.build() == (
        ALL_FRESH | {"02-02": "built"}, ["rebuilding 02-02: its graph has changed"],
    )  # fmt: skip


def test_a_changed_policy_builds_its_stages_only(bench: Bench, tmp_path: Path) -> None:
    from offramp.bundle import ActiveExit, write_bundle

    bench.build()
    bundle = bench.bundle
    names = [e.path for e in bundle.manifest.files if e.path != "policy.json"]
    policy = replace(bundle.policy, active=(ActiveExit(exit=0, threshold=0.7),))
    write_bundle(
        bundle.path, bundle.manifest, policy, {name: bundle.read(name) for name in names},
        overwrite=True, engines_of=bundle.path,
    )  # fmt: skip
    results, lines = bench.build()
    assert lines == []
    assert {name for name, status in results.items() if status == "built"} == {"01-03"}
    assert bench.store.entry("00-01-exit1") is not None


def damage(bench: Bench, unit: str) -> None:
    entry = bench.store.entry(unit)
    assert entry is not None
    (bench.store.folder / entry.file).write_bytes(b"damaged")


def test_a_damaged_plan_is_built_again(bench: Bench) -> None:
    bench.build()
    damage(bench, "02-03")
    line = "rebuilding 02-03: its file is missing or was altered"
    assert bench.build() == (ALL_FRESH | {"02-03": "built"}, [line])
    assert bench.build() == (ALL_FRESH, [])


def test_with_a_damaged_index_everything_is_built_again(bench: Bench) -> None:
    bench.build()
    index = bench.store.folder / "index.json"
    files = {place.name for place in index.parent.iterdir()}
    index.write_bytes(b"damaged")
    results, lines = bench.build()
    assert results == ALL_BUILT
    assert len(lines) == 1
    assert "not JSON" in lines[0]
    assert "all engines of this target are built again" in lines[0]
    assert {place.name for place in index.parent.iterdir()} == files


def test_rebuild_builds_what_is_fresh(bench: Bench) -> None:
    bench.build()
    line = "rebuilding 7 engines (00-03, 00-01-exit1, 02-03, …): asked for by --rebuild"
    assert bench.build(rebuild=True) == (ALL_BUILT, [line])


def test_rebuild_says_nothing_of_what_is_not_there(bench: Bench) -> None:
    assert bench.build(rebuild=True) == (ALL_BUILT, [])


def test_parts_build_a_part_and_leave_the_rest(bench: Bench) -> None:
    stages = replace(SOURCE_FIRST, parts=("stages",))
    assert bench.build(stages)[0] == {"00-01-exit1": "built", "02-03": "built"}
    assert bench.build()[0] == ALL_BUILT | {"00-01-exit1": "fresh", "02-03": "fresh"}
    bench.build(stages)
    assert len(bench.store.index.engines) == 7


def test_prune_removes_what_is_not_asked_for(bench: Bench) -> None:
    bench.builder = FakeBuilder(version="8.6.0")
    bench.build()
    bench.builder = FakeBuilder()
    bench.build()
    stages = replace(SOURCE_FIRST, parts=("stages",))
    results, lines = bench.build(stages, prune=True)
    assert results == {"00-01-exit1": "fresh", "02-03": "fresh"}
    gone = sorted(set(UNITS) - {"00-01-exit1", "02-03"})
    assert lines == [f"removed {n}" for n in [*gone, "fake-gpu-sm90-trt8.6.0-fp32"]]
    assert [e.unit for e in bench.store.index.engines] == ["00-01-exit1", "02-03"]


def test_an_interrupted_build_goes_on_where_it_was(bench: Bench) -> None:
    def interrupt(built: int) -> None:
        if built == 3:
            raise KeyboardInterrupt

    bench.builder = FakeBuilder(before_build=interrupt)
    with pytest.raises(KeyboardInterrupt):
        bench.build()
    assert bench.builder.closed
    assert {e.unit for e in bench.store.index.engines} == set(UNITS[:3])
    bench.builder = FakeBuilder()
    results, lines = bench.build()
    assert [name for name, status in results.items() if status == "fresh"] == UNITS[:3]
    assert lines == []
    assert bench.builder.builds[0].timing_cache  # the first three's
    assert bench.steps[1][0] == "Build 00-00-exit0 (1 of 4)"


def test_one_failing_unit_leaves_the_others_alone(bench: Bench) -> None:
    def fail(built: int) -> None:
        if built == 1 and not failed:
            failed.append(built)
            raise EngineBuildError("TensorRT says no")

    failed: list[int] = []
    bench.builder = FakeBuilder(before_build=fail)
    assert bench.build()[0] == ALL_BUILT | {"00-01-exit1": "failed"}
    (result,) = bench.done.failed
    assert result.problem == "00-01-exit1: TensorRT says no"
    assert bench.store.entry("00-01-exit1") is None
    assert bench.build()[0] == ALL_FRESH | {"00-01-exit1": "built"}


def doubling() -> FakeBuilder:
    return FakeBuilder(alter=lambda outputs: {n: a * 2 for n, a in outputs.items()})


def test_a_wrong_engine_is_not_stored_nor_replaces_a_good_one(bench: Bench) -> None:
    bench.build()
    before = bench.store.entry("02-03")
    bench.builder = doubling()
    other = replace(SOURCE_FIRST, optimization_level=5)
    assert bench.build(other)[0] == dict.fromkeys(UNITS, "failed")
    assert bench.store.entry("02-03") == before
    problem = bench.done.failed[2].problem
    tells(problem, "02-03", "'logits'", "differs")
    assert "(profile 0, batch 1)" in problem


def test_what_could_not_be_rebuilt_is_not_fresh_the_next_time(bench: Bench) -> None:
    """The engine should have been replaced, and has the key of the wrong build."""
    bench.build()
    path, target = bench.bundle.path, bench.store.index.target
    bench.builder = doubling()
    stages = replace(SOURCE_FIRST, parts=("stages",))
    failed = dict.fromkeys(["00-01-exit1", "02-03"], "failed")
    assert bench.build(stages, rebuild=True)[0] == failed
    assert {e.unit for e in EngineStore.open(path, target).index.engines} == set(UNITS) - set(
        failed
    )
    assert bench.build(stages)[0] == failed
    bench.builder = FakeBuilder()
    assert bench.build()[0] == ALL_FRESH | dict.fromkeys(failed, "built")


def test_what_an_interrupted_build_left_is_removed(bench: Bench) -> None:
    bench.build()
    left = bench.store.folder / ".scratch"
    left.write_bytes(b"half")
    assert bench.build()[0] == ALL_FRESH
    assert not left.exists()


def test_a_unit_without_a_graph_fails_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    of = build.UnitGraphs.of

    def refuse(graphs: build.UnitGraphs, unit: Any) -> bytes:
        if unit.name == "03-03":
            raise ModelError("TensorRT 8.6 cannot read Foo")
        return of(graphs, unit)

    monkeypatch.setattr(build.UnitGraphs, "of", refuse)
    assert bench.build()[0] == ALL_BUILT | {"03-03": "failed"}
    tells(bench.done.failed[0].problem, "03-03", "TensorRT 8.6", "Foo")


def test_graphs_that_differ_each_time_are_refused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keyed on their hash, their engines would never be fresh."""
    of, calls = build.UnitGraphs.of, []

    def unsteady(graphs: build.UnitGraphs, unit: Any) -> bytes:
        calls.append(unit)
        return of(graphs, unit) + b"\x32\x01%d" % (len(calls) % 2)

    monkeypatch.setattr(build.UnitGraphs, "of", unsteady)
    assert bench.build()[0] == dict.fromkeys(UNITS, "failed")
    assert "differs each time" in bench.done.failed[0].problem


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KernelCompilerNotFoundError("neither nvcc nor NVRTC"), "warning: no CUDA compiler"),
        (KernelCompileError("ptxas said no"), "warning: the kernels are not in the bundle"),
    ],
)
def test_kernels_that_cannot_be_compiled_are_a_warning(
    bench: Bench, error: Exception, said: str
) -> None:
    bench.cubin = error
    results, (line,) = bench.build()
    assert results == ALL_BUILT
    assert line.startswith(said)
    assert str(error) in line
    assert bench.store.read_kernels(source_hash()) is None


def test_kernels_of_other_sources_are_dropped_where_none_can_be_compiled(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.build()
    bench.cubin = KernelCompilerNotFoundError("neither nvcc nor NVRTC")
    assert bench.build() == (ALL_FRESH, [])  # those of the last build do
    assert bench.store.read_kernels(source_hash()) == b"cubin for 9.0"
    monkeypatch.setattr(build, "source_hash", lambda: "f" * 64)
    (line,) = bench.build()[1]
    assert line.startswith("warning: no CUDA compiler")
    assert bench.store.index.kernels is None
    assert not list(bench.store.folder.glob("*.cubin"))


def test_damaged_kernels_are_dropped_where_none_can_be_compiled(bench: Bench) -> None:
    bench.build()
    (place,) = bench.store.folder.glob("*.cubin")
    place.write_bytes(b"damaged")
    bench.cubin = KernelCompilerNotFoundError("neither nvcc nor NVRTC")
    assert bench.build()[1][0].startswith("warning: no CUDA compiler")
    assert bench.store.index.kernels is None


def test_kernels_are_compiled_for_the_driver(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def find_device(index: int) -> Any:
        asked.append(index)
        return SimpleNamespace(driver_version=(12, 8))

    monkeypatch.setattr(build, "find_device", find_device)
    bench.build(replace(SOURCE_FIRST, device="cuda:3"))
    assert (asked, bench.driver_version) == ([3], (12, 8))


def test_kernels_that_the_build_keeps_are_those_that_the_server_takes(bench: Bench) -> None:
    from offramp.engine.backends import factory

    bench.build()
    device = Device(
        index=0, name="Fake GPU", compute_capability=(9, 0), driver_version=(13, 0), total_bytes=1
    )
    assert factory.kernels_for(device, [bench.bundle.path]) == b"cubin for 9.0"


def test_fp16_without_data_is_measured_when_data_is_given(bench: Bench, tmp_path: Path) -> None:
    """All engines are fresh then; the notice that asked for data must not have been in vain."""
    fp16 = replace(SOURCE_FIRST, precision="fp16", parts=("source",), accept_disagreement=True)
    built, (line,) = bench.build(fp16)
    assert (built, line[:40]) == ({"00-03": "built"}, "fp16: what it costs in answers is not me")
    assert bench.build(fp16) == ({"00-03": "fresh"}, [])
    np.savez(tmp_path / "data.npz", **inputs_of(sliced("mlp"), 64))
    fresh, (line,) = bench.build(fp16, data=tmp_path / "data.npz")
    assert fresh == {"00-03": "fresh"}
    assert line.startswith("fp16: of 32 samples the model answers")


FP16 = EngineBuildOptions(precision="fp16", batches=SOURCE_FIRST.batches)


class Certifying:
    """A build with the data of the compilation, of which everything is found certified."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.data = tmp_path / "data.npz"
        np.savez(self.data, **inputs_of(sliced("mlp"), 64))
        self.asked = 0
        self.recognised = True
        monkeypatch.setattr(build, "part_data", self.parted)
        monkeypatch.setattr(build, "certify_engines", self.certified)

    def parted(self, *arguments: Any, **others: Any) -> PrecisionData:
        return part_data(*arguments, **others)._replace(certifies=self.recognised)

    def certified(
        self, bundle: Bundle, precision: Precision, _ranges: object, _parts: object, **_: Any
    ) -> Recertified:
        self.asked += 1
        promise, records = bundle.policy.promise, bundle.read("records.npz")
        assert promise is not None
        evidence = PrecisionEvidence(
            model=model_digest(bundle.manifest),
            policy=replace(bundle.policy, version=9),
            records=addressed("records", records, ".npz"),
            samples=1000,
            end_differs=self.asked,
            max_disagreement=0.01,
            confidence_level=0.95,
        )
        return Recertified(precision=precision, evidence=evidence, records=records, promise=promise)


@pytest.fixture
def certifying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Certifying:
    return Certifying(tmp_path, monkeypatch)


def test_what_was_certified_is_kept_with_the_engines(bench: Bench, certifying: Certifying) -> None:
    _, (line,) = bench.build(FP16, data=certifying.data)
    tells(line, "fp16", "1,000 samples", "0.10%")
    evidence = bench.store.index.evidence
    assert evidence is not None
    assert bench.store.read_evidence(evidence) == bench.bundle.read("records.npz")
    for data in (certifying.data, None):  # it fits, with data or without
        assert bench.build(FP16, data=data) == (ALL_FRESH, [])
        assert bench.store.index.evidence == evidence
    assert certifying.asked == 1
    bench.build(FP16, rebuild=True)
    assert bench.store.index.evidence == evidence


def test_other_data_certify_nothing_and_spoil_nothing(bench: Bench, certifying: Certifying) -> None:
    bench.build(FP16, data=certifying.data)
    evidence = bench.store.index.evidence
    certifying.recognised = False
    with pytest.raises(VerificationError, match=r"of 32 samples .* is broken"):
        bench.build(FP16, data=certifying.data, rebuild=True)
    assert bench.store.index.evidence == evidence
    assert certifying.asked == 1


def test_what_is_accepted_is_not_certified(bench: Bench, certifying: Certifying) -> None:
    bench.build(FP16, data=certifying.data)
    assert bench.store.index.evidence is not None
    assert certifying.asked == 1
    accepting = replace(FP16, accept_disagreement=True)
    _, (line,) = bench.build(accepting, data=certifying.data)
    assert line.startswith("fp16: of 32 samples the model answers")
    assert bench.store.index.evidence is None
    assert certifying.asked == 1


def test_engines_that_fail_leave_nothing_certified(bench: Bench, certifying: Certifying) -> None:
    def fails(number: int) -> None:
        if number == 3:
            raise EngineBuildError("no")

    bench.builder = FakeBuilder(before_build=fails)
    bench.build(FP16, data=certifying.data)
    assert bench.done.failed
    assert bench.store.index.evidence is None
    bench.builder = FakeBuilder()
    bench.build(FP16, data=certifying.data)
    assert bench.store.index.evidence is not None


def test_a_policy_of_another_time_is_certified_again(
    bench: Bench, certifying: Certifying, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.build(FP16, data=certifying.data)
    monkeypatch.setattr(build, "model_digest", lambda _: "rehearsed since")
    _, (line,) = bench.build(FP16)
    assert "what it costs in answers is not measured" in line
    assert bench.store.index.evidence is None


def test_a_folder_that_another_build_is_at_work_in_is_not_pruned(bench: Bench) -> None:
    bench.builder = FakeBuilder(version="8.6.0")
    bench.build()
    other = bench.store
    bench.builder = FakeBuilder()
    with other.exclusively():
        lines = bench.build(prune=True)[1]
        tells(lines[-1], "fake-gpu-sm90-trt8.6.0-fp32", "not removed", "another build")
        assert other.folder.is_dir()
    assert bench.build(prune=True)[1] == ["removed fake-gpu-sm90-trt8.6.0-fp32"]


def reasons(planned: tuple[Planned, ...]) -> dict[str, str]:
    assert all(isinstance(plan, PlannedEngine) for plan in planned)
    return {plan.unit.name: plan.stale for plan in planned if isinstance(plan, PlannedEngine)}


def test_a_dry_run_builds_and_writes_nothing(bench: Bench) -> None:
    assert reasons(bench.plan()) == dict.fromkeys(UNITS, "not there yet")
    assert not (bench.bundle.path / "engines").exists()
    bench.build()
    damage(bench, "02-03")
    expected = dict.fromkeys(UNITS, "") | {"02-03": "its file is missing or was altered"}
    bench.builder.builds.clear()
    assert reasons(bench.plan()) == expected
    assert bench.builder.builds == []
    assert bench.store.entry("02-03") is not None


def test_a_dry_run_without_a_gpu_says_what_is_known(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from offramp.compiler.common.errors import EnginesUnavailableError

    def unavailable(device: str) -> None:
        raise EnginesUnavailableError(f"no GPU {device}")

    bench.build()
    monkeypatch.setattr(build, "make_builder", unavailable)
    assert reasons(bench.plan()) == dict.fromkeys(UNITS, "")
    [said] = bench.lines
    tells(said, "cuda:0", "without it")
    tf32 = replace(SOURCE_FIRST, precision="tf32")
    assert reasons(bench.plan(tf32)) == dict.fromkeys(UNITS, "not there yet")
    with pytest.raises(EnginesUnavailableError, match="no GPU cuda:0"):
        bench.build()


def test_fp16_without_data_says_what_is_not_measured(bench: Bench) -> None:
    options = replace(SOURCE_FIRST, precision="fp16")
    results, (line,) = bench.build(options)
    assert results == ALL_BUILT
    assert line.startswith("fp16: what it costs in answers is not measured, and the promise holds")
    assert bench.build(options) == (ALL_FRESH, [])


@pytest.mark.parametrize(
    ("text", "parts"),
    [("stages", ("stages",)), ("segments, source", ("source", "segments"))],
)
def test_parts_from_the_command_line(text: str, parts: tuple[str, ...]) -> None:
    assert parse_parts(text) == parts


@pytest.mark.parametrize("text", ["", "exits", "stages,stage"])
def test_unknown_parts(text: str) -> None:
    with pytest.raises(EngineOptionsError, match="choose from source, stages, segments"):
        parse_parts(text)


def test_the_outermost_phase_drives_the_bar() -> None:
    done: list[int] = []
    report = outermost(done.append)
    for call in [("Build", 0, 4), ("Inner", 9, 9), ("Build", 1, 4), ("Build", 1, 4),
                 ("Inner", 1, 9), ("Build", 4, 4), ("Build", 5, 4), ("Empty", 0, 0)]:  # fmt: skip
        report(*call)
    assert done == [25, 75]


def test_a_builder_that_reports_nothing_of_steps_is_no_error() -> None:
    outermost(pytest.fail)("Build", 0, 0)
