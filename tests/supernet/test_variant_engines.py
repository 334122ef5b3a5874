"""Engines of variants: built with the full model's, and served by a fake TensorRT."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.facts import tells
from tests.fake_builder import FakeBuilder
from tests.served_variants import (
    ROWS,
    Compiled,
    answers_of,
    fixed,
    of,
    own,
    serve,
    with_policies,
)
from tests.unit.engine.serving import until
from tests.unit.tensorrt.bindings import TENSORRT_VERSIONS
from tests.unit.tensorrt.fake_runtime import FakeRuntime

from offramp.bundle import Bundle, ExitPolicy
from offramp.bundle.engines import EngineEntry, EngineStore, Precision
from offramp.compiler.commands.printing import part_of
from offramp.compiler.common.errors import EngineOptionsError
from offramp.compiler.engines import build
from offramp.compiler.engines.build import BuildOptions, Reports, build_bundle
from offramp.compiler.engines.build_options import EngineBuildOptions, parse_batches
from offramp.compiler.engines.building import Building
from offramp.compiler.engines.units import Unit, UnitGraphs, named_units, units_of
from offramp.engine.backends.tensorrt import TensorRTFactory
from offramp.engine.core import Engine
from offramp.engine.cuda.cuda_backend import CudaBackend
from offramp.engine.models import device_profile, variants
from offramp.engine.serving import evidence
from offramp.engine.stages.plan import Mode, make_plan
from offramp.engine.tensorrt import tensorrt_messages
from offramp.testing.cuda_driver import FakeDriver

VERSION = TENSORRT_VERSIONS[-1]


@pytest.fixture(scope="module")
def compiled(with_variants: Path) -> Compiled:
    return Compiled.of(with_variants)


@pytest.fixture
def bundle(compiled: Compiled, tmp_path: Path) -> Bundle:
    """A copy, which engines can be built into; each variant has one stage, to its own answer."""
    return with_policies(compiled.quiet, tmp_path / "b.ee", ExitPolicy(version=1, active=()))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRuntime]:
    device = FakeDriver()
    made = FakeRuntime(VERSION, device)
    monkeypatch.setitem(sys.modules, "tensorrt", made.module)
    tensorrt_messages.logger.cache_clear()
    yield made
    tensorrt_messages.logger.cache_clear()
    device.close()
    assert not made.contexts
    assert not made.engines


def built(
    bundle: Bundle,
    monkeypatch: pytest.MonkeyPatch,
    *,
    precision: Precision = "fp32",
    version: str = "10.16.0.72",
    said: list[str] | None = None,
) -> Building:
    """Build all engines by a builder without a GPU, which verifies each against its graph."""
    monkeypatch.setattr(build, "make_builder", lambda _device: FakeBuilder(version=version))
    monkeypatch.setattr(build, "load_kernels", lambda *_, **__: b"cubin")
    engines = EngineBuildOptions(batches=parse_batches("1,2-8"), precision=precision)
    print_line = (said if said is not None else []).append
    return build_bundle(
        BuildOptions(bundle=bundle.path, engines=engines), Reports(print_line=print_line)
    )


def build_for(fake: FakeRuntime, bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> Building:
    """Build all engines, in the form that the fake TensorRT loads."""
    found = built(bundle, monkeypatch, version=fake.module.__version__)
    store = EngineStore.open(bundle.path, found.target)
    graphs = UnitGraphs(bundle, "fp32", tensorrt_version=fake.module.__version__)
    for result in found.results or ():
        entry = result.entry
        assert entry is not None, result.problem
        plan = fake.plan(graphs.of(result.unit), list(entry.profiles))
        put = EngineEntry.of(
            entry.unit, plan, key=entry.key, profiles=entry.profiles, build_s=entry.build_s
        )
        store.put(put, plan)
    return found


def test_engines_are_built_of_variants_up_to_their_own_answer(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = built(bundle, monkeypatch)
    assert {r.status for r in done.results or ()} == {"built"}
    names = {r.unit.name for r in done.results or ()}
    for number in (1, 2):
        manifest = bundle.variant(number).manifest
        last, exit_ = manifest.source_begins - 1, manifest.exits[-1].index
        assert f"variant{number}-00-{last:02d}-exit{exit_}" in names
        assert not any(n.startswith(f"variant{number}-{last + 1:02d}") for n in names)
    again = built(bundle, monkeypatch)
    assert {r.status for r in again.results or ()} == {"fresh"}


def test_the_engine_of_a_variants_stage_is_made_of_its_own_segments(
    compiled: Compiled, bundle: Bundle
) -> None:
    graphs = UnitGraphs(bundle, "fp32", tensorrt_version="10.0")
    shown = bundle.variant(1)
    stage, _ = make_plan(shown, shown.policy).stages
    unit = Unit(*stage.unit, variant=1)
    assert unit in units_of(bundle, ["stages"])
    assert part_of(unit, bundle) == "stage of variant 4 bits"
    expected = compiled.answers(compiled.copies[0])
    np.testing.assert_allclose(compiled.answers(graphs.of(unit)), expected, rtol=1e-4, atol=1e-5)


def test_units_of_variants_are_named(bundle: Bundle) -> None:
    last = bundle.variant(2).manifest.exits[-1]
    unit = Unit(0, last.after_segment, last.index, 2)
    assert named_units(bundle.manifest, [unit.name]) == (unit,)
    for name in ("variant3-00-00", "variant0-00-00"):
        with pytest.raises(EngineOptionsError, match="has 2 variants, from 1"):
            named_units(bundle.manifest, [name])
    with pytest.raises(EngineOptionsError, match="there is no 'variant1-00-99'"):
        named_units(bundle.manifest, ["variant1-00-99"])


def test_no_variant_is_built_in_a_precision_that_rounds(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    done = built(bundle, monkeypatch, precision="fp16", said=said)
    assert all(not result.unit.variant for result in done.results or ())
    tells("\n".join(said), "variants", "float32", "fp16")


@pytest.mark.usefixtures("quick_variants")
def test_engines_run_variants_and_one_full_model_for_audits(
    compiled: Compiled, bundle: Bundle, fake: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "AUDITED_SHARE", 1.0)
    build_for(fake, bundle, monkeypatch)
    backend = tensorrt(fake)

    async def body(engine: Engine) -> None:
        result = await engine.infer("m", compiled.unseen)
        expected = compiled.answers(compiled.copies[0])
        np.testing.assert_allclose(answers_of(result), expected, rtol=1e-4, atol=1e-5)
        assert (result.variants == 1).all()
        assert (result.exits == own(bundle, 1)).all()
        assert result.forced.all()
        await until(lambda: of(engine).auditing == 0 and of(engine).in_flight == 0)
        mine = of(engine).variants[0]
        said = answers_of(result).argmax(1)
        assert mine.audited == ROWS
        assert mine.disagreed == int((said != compiled.full.argmax(1)).sum())

    serve(bundle, body, mode=Mode.AUDIT, policy=fixed(bundle, 1), backend=backend)
    backend.close()


def test_the_log_names_the_engines_that_variants_lack(
    compiled: Compiled,
    bundle: Bundle,
    fake: FakeRuntime,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    done = build_for(fake, bundle, monkeypatch)
    store = EngineStore.open(bundle.path, done.target)
    for entry in store.index.engines:
        if entry.unit.startswith("variant2"):
            store.drop(entry.unit)
    backend = tensorrt(fake)

    async def body(engine: Engine) -> None:
        assert engine.model("m").variants == ()
        result = await engine.infer("m", compiled.unseen)
        assert not result.variants.any()

    serve(bundle, body, policy="slackfit", backend=backend)
    backend.close()
    (line,) = [r.getMessage() for r in caplog.records if r.name == variants.__name__]
    tells(line, "full", "4 bits, 2 bits", "not serve")
    assert "variant2-00-" in line
    assert "is not built" in line
    assert f"eecompile build {bundle.path}" in line


def test_the_log_says_that_rounded_engines_run_no_variants(
    bundle: Bundle,
    fake: FakeRuntime,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The engines here are of fp16 by name alone: their graphs are those of fp32."""
    done = build_for(fake, bundle, monkeypatch)
    store = EngineStore.open(bundle.path, done.target)
    rounded = EngineStore.empty(bundle.path, replace(done.target, precision="fp16"))
    for entry in store.index.engines:
        plan = store.read(entry)
        key = {**entry.key, "precision": "fp16"}
        put = EngineEntry.of(entry.unit, plan, key=key, profiles=entry.profiles, build_s=1.0)
        rounded.put(put, plan)
    backend = tensorrt(fake)

    async def body(engine: Engine) -> None:
        assert engine.model("m").variants == ()

    serve(bundle, body, policy="slackfit", backend=backend)
    backend.close()
    (line,) = [r.getMessage() for r in caplog.records if r.name == variants.__name__]
    tells(line, "fp16", "--precision fp32")


def tensorrt(fake: FakeRuntime) -> CudaBackend:
    device: Any = fake.device
    return CudaBackend(TensorRTFactory(device), device, kernels=b"")


@pytest.fixture
def quick_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make variants four times faster than what is before them."""

    def stages_ms(pipeline: Any, *_: Any) -> list[float]:
        stages = pipeline.plan.stages
        number = stages[0].bundle.number
        return [8.0 / 4**number] * (len(stages) - 1) + [8.0]

    monkeypatch.setattr(device_profile, "_stages_ms", stages_ms)
