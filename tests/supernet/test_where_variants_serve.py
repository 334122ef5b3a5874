"""Variants in release mode, on workers and on a GPU; and the reason where they do not serve."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cluster.held import cluster_for
from tests.cuda_fakes import FakePrepared, fake_cuda
from tests.facts import tells
from tests.served_variants import (
    ROWS,
    Compiled,
    answers_of,
    fixed,
    of,
    own,
    serve,
)
from tests.unit.engine.serving import until

from offramp.certify.decision import MODEL_END
from offramp.cluster.remote.launching import LocalLauncher
from offramp.cluster.remote.worker_backend import RemoteBackend
from offramp.cluster.serving.worker_devices import LocalWorkers, OpenedWorkers
from offramp.engine.backends import make_backend
from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend
from offramp.engine.common.errors import BackendError, OptionsError
from offramp.engine.core import Engine
from offramp.engine.models import device_profile, variants
from offramp.engine.models.deployment import STAGE_OVERHEAD_S
from offramp.engine.serving import evidence
from offramp.engine.stages.pipeline import Pipeline
from offramp.engine.stages.plan import Mode, StageSpec


@pytest.fixture(scope="module")
def compiled(with_variants: Path) -> Compiled:
    return Compiled.of(with_variants)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the log messages about variants that do not serve."""
    return [r.getMessage() for r in caplog.records if r.name == variants.__name__]


async def answers_as_its_subnet(engine: Engine, compiled: Compiled, variant: int) -> None:
    """Every answer is the variant's own, and forced: its certificate covers none."""
    result = await engine.infer("m", compiled.unseen)
    expected = compiled.answers(compiled.copies[variant - 1])
    np.testing.assert_allclose(answers_of(result), expected, rtol=1e-4, atol=1e-5)
    assert (result.variants == variant).all()
    assert (result.exits == own(compiled.quiet, variant)).all()
    assert result.forced.all()


# Release mode


def test_a_variant_ends_at_its_own_answer_in_release_mode(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Audits are off here: they would compare requests that ran on to the full model."""
    monkeypatch.setattr(evidence, "AUDITED_SHARE", 0.0)

    async def body(engine: Engine) -> None:
        await answers_as_its_subnet(engine, compiled, 1)
        await until(lambda: of(engine).in_flight == of(engine).auditing == 0)
        control = of(engine).control
        assert control is not None
        assert control.observed == 0, "they are no evidence about the full model's exits"
        assert of(engine).variants[0].audited == of(engine).lost_feedback == 0

    serve(compiled.quiet, body, mode=Mode.RELEASE, policy=fixed(compiled.quiet, 1))


def test_audits_in_release_mode_compare_a_variant_with_the_full_model(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "AUDITED_SHARE", 1.0)
    said = compiled.answers(compiled.copies[1]).argmax(1)

    async def body(engine: Engine) -> None:
        await answers_as_its_subnet(engine, compiled, 2)
        await until(lambda: of(engine).auditing == 0 and of(engine).in_flight == 0)
        mine = of(engine).variants[1]
        assert mine.audited == ROWS
        assert mine.disagreed == int((said != compiled.full.argmax(1)).sum()) > 0

    serve(compiled.quiet, body, mode=Mode.RELEASE, policy=fixed(compiled.quiet, 2))


def test_what_the_full_model_answers_in_release_mode_runs_on_beside_variants(
    compiled: Compiled,
) -> None:
    """Without deadlines ``slackfit`` takes the full model, and all of it is evidence."""

    async def body(engine: Engine) -> None:
        assert engine.model("m").variants == ("4 bits", "2 bits")
        for row in range(8):
            sample = {name: array[row : row + 1] for name, array in compiled.unseen.items()}
            result = await engine.infer("m", sample)
            assert not result.variants.any()
        await until(lambda: of(engine).auditing == 0)
        counted = of(engine)
        assert counted.lost_feedback == 0

    serve(compiled.bundle, body, mode=Mode.RELEASE, policy="slackfit", trust_inputs=True)


# Other runtimes on the CPU


def test_openvino_runs_variants(compiled: Compiled) -> None:
    backend = make_backend("openvino", threads=1, max_rows=8)

    async def body(engine: Engine) -> None:
        await answers_as_its_subnet(engine, compiled, 1)

    serve(compiled.quiet, body, policy=fixed(compiled.quiet, 1), backend=backend)
    backend.close()


# Workers and splits


def test_workers_run_variants(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    """Audits run the full model after them there too."""
    monkeypatch.setattr(evidence, "AUDITED_SHARE", 1.0)

    async def body(engine: Engine) -> None:
        await answers_as_its_subnet(engine, compiled, 1)
        await until(lambda: of(engine).auditing == 0 and of(engine).in_flight == 0)
        assert of(engine).variants[0].audited == ROWS

    serve(
        compiled.quiet,
        body,
        mode=Mode.AUDIT,
        policy=fixed(compiled.quiet, 1),
        devices=LocalWorkers(1),
    )


def test_variants_outlast_a_worker(compiled: Compiled) -> None:
    workers = RemoteBackend(OnnxRuntimeBackend(threads=1), launchers=[LocalLauncher()] * 2)

    async def body(engine: Engine) -> None:
        await answers_as_its_subnet(engine, compiled, 2)
        os.kill(workers.pids[0], signal.SIGKILL)
        for _ in range(4):
            await answers_as_its_subnet(engine, compiled, 2)

    try:
        serve(
            compiled.quiet,
            body,
            policy=fixed(compiled.quiet, 2),
            backend=workers,
            devices=OpenedWorkers(2),
        )
    finally:
        workers.close()


def test_the_log_says_why_variants_do_not_serve_on_splits(
    compiled: Compiled, caplog: pytest.LogCaptureFixture
) -> None:
    kinds = ("fast", "slow")
    cluster = cluster_for(compiled.bundle, share=2.0, count=1)
    workers = RemoteBackend(
        OnnxRuntimeBackend(threads=1), launchers=[LocalLauncher(device_type=k) for k in kinds]
    )

    async def body(engine: Engine) -> None:
        assert engine.model("m").variants == ()
        result = await engine.infer("m", compiled.unseen)
        assert not result.variants.any()

    try:
        serve(
            compiled.bundle,
            body,
            policy="slackfit",
            backend=workers,
            devices=OpenedWorkers(2, cluster),
        )
    finally:
        workers.close()
    (line,) = told(caplog)
    tells(line, "full", "4 bits, 2 bits", "not serve", "splits the model")
    assert "policy refill, which merges batches" in line
    assert "use --workers N instead of --cluster" in line


# GPUs


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU on which a row takes 8 ms of the full model, and a quarter in each next variant."""

    def stages_ms(pipeline: Pipeline, _slot: Any, tensors: Any, _clock: Any) -> list[float]:
        rows, stages = len(next(iter(tensors.values()))), pipeline.plan.stages
        return [rows * row_ms(spec, len(stages)) for spec in stages]

    monkeypatch.setattr(device_profile, "_stages_ms", stages_ms)


def row_ms(spec: StageSpec, stages: int) -> float:
    assert spec.bundle is not None
    number, begins = spec.bundle.number, spec.bundle.manifest.source_begins
    if not number:
        return 8 / stages
    return 8.0 if spec.first_segment >= begins else 8 / 4**number / (stages - 1)


@pytest.mark.usefixtures("timed")
@pytest.mark.parametrize("mode", [Mode.LEAVE, Mode.AUDIT, Mode.RELEASE])
def test_a_gpu_runs_variants(
    compiled: Compiled, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The full model after both of them is loaded once."""
    monkeypatch.setattr(evidence, "AUDITED_SHARE", 1.0)
    backend, factory, _ = fake_cuda(max_rows=8)
    loaded = noted(factory, monkeypatch)

    async def body(engine: Engine) -> None:
        await answers_as_its_subnet(engine, compiled, 1)
        await until(lambda: of(engine).auditing == 0 and of(engine).in_flight == 0)
        assert of(engine).variants[0].audited == (ROWS if mode.observed else 0)
        begins = compiled.quiet.variant(1).manifest.source_begins
        behind = [unit for number, *unit in loaded.elements() if number and unit[0] >= begins]
        assert len(behind) == 1

    serve(compiled.quiet, body, mode=mode, policy=fixed(compiled.quiet, 1), backend=backend)
    backend.close()


@pytest.mark.usefixtures("timed")
def test_the_stages_of_variants_are_timed_on_a_gpu(compiled: Compiled) -> None:
    """Policies choose by what the device takes, and not by what the CPU took that compiled."""
    backend, _, _ = fake_cuda(max_rows=8)

    async def body(engine: Engine) -> None:
        (served,) = (version.model for version in engine._versions.current.values())
        _, *tables = served.deployment.points.latencies.variants
        for number, table in enumerate(tables, 1):
            taken_s = [table.seconds[stage][8] - STAGE_OVERHEAD_S for stage in (0, 1)]
            assert taken_s == pytest.approx([8 * 8e-3 / 4**number, 8 * 8e-3])
        assert len(tables) == 2

    serve(compiled.quiet, body, policy="slackfit", backend=backend)
    backend.close()


def test_the_log_names_variants_that_others_dominate(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Here both variants take the same time, and the second agrees less often."""

    def stages_ms(pipeline: Pipeline, *_: Any) -> list[float]:
        return [1.0 + 9.0 * (spec.exit == MODEL_END) for spec in pipeline.plan.stages]

    monkeypatch.setattr(device_profile, "_stages_ms", stages_ms)
    backend, _, _ = fake_cuda(max_rows=8)

    async def body(engine: Engine) -> None:
        assert engine.model("m").variants == ("4 bits", "2 bits")

    with caplog.at_level("INFO", variants.__name__):
        serve(compiled.quiet, body, policy="slackfit", backend=backend)
    backend.close()
    (line,) = told(caplog)
    tells(line, "full", "2 bits", "never chosen", "operating points")


def test_the_full_model_serves_where_a_device_refuses_a_variant(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend, factory, _ = fake_cuda(max_rows=8)
    refuse_variant(factory, monkeypatch, 2)

    async def body(engine: Engine) -> None:
        assert engine.model("m").variants == ()
        result = await engine.infer("m", compiled.unseen)
        assert not result.variants.any()

    serve(compiled.quiet, body, policy="max-accuracy", backend=backend)
    [said] = told(caplog)
    tells(said, "full", "4 bits, 2 bits", "no room for the second")
    with pytest.raises(OptionsError, match=r"exit \d+@1 is not in use here"):
        serve(compiled.quiet, body, policy=fixed(compiled.quiet, 1), backend=backend)
    backend.close()


def noted(factory: Any, monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[Any, ...]]:
    """Count the stages that a device loads, by variant and unit."""
    found: Counter[tuple[Any, ...]] = Counter()
    prepare = factory.prepare

    def observed(spec: StageSpec) -> FakePrepared:
        found[spec.bundle.number if spec.bundle else 0, *spec.unit] += 1
        prepared: FakePrepared = prepare(spec)
        return prepared

    monkeypatch.setattr(factory, "prepare", observed)
    return found


def refuse_variant(factory: Any, monkeypatch: pytest.MonkeyPatch, variant: int) -> None:
    """Make a device refuse the stages of a variant."""
    prepare = factory.prepare

    def refusing(spec: StageSpec) -> FakePrepared:
        if spec.bundle is not None and spec.bundle.number == variant:
            raise BackendError("no room for the second")
        prepared: FakePrepared = prepare(spec)
        return prepared

    monkeypatch.setattr(factory, "prepare", refusing)
