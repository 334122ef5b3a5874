"""Control over a real bundle on ONNX Runtime: feedback is true, drift is met, state survives."""

from __future__ import annotations

import asyncio
import platform
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.bundles import EXAMPLE
from tests.unit.engine.serving import until

from offramp.bundle import NEVER, ActiveExit, Bundle, ExitPolicy
from offramp.engine.backends import make_backend
from offramp.engine.control.controller import Evidence
from offramp.engine.core import Engine
from offramp.engine.models.deployment import DeploymentMaker
from offramp.engine.models.options import EngineOptions, ModelOptions
from offramp.engine.requests.results import ResultKind
from offramp.engine.stages.pipeline import zeros
from offramp.engine.stages.plan import Mode

LIMIT_S = 120.0
IMAGES = np.load(EXAMPLE / "test.npz")["image"]
CLASSES = 10


def with_engine(
    path: Path,
    mode: Mode,
    body: Callable[[Engine], Coroutine[Any, Any, None]],
    *,
    keep_state: bool = False,
    **options: Any,
) -> None:
    settings = EngineOptions(
        mode=mode,
        keep_state=keep_state,
        # what was timed on a busy machine must not decide which exits are in use
        defaults=ModelOptions(max_batch_size=16, ramp_budget=0.99, **options),
    )

    async def run() -> None:
        async with await Engine.open({"fashion": path}, settings) as engine:
            await asyncio.wait_for(body(engine), LIMIT_S)

    asyncio.run(run())


async def ask(engine: Engine, images: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Classes of images, asked for in requests of 16."""
    found = await asyncio.gather(
        *(engine.infer("fashion", {"image": images[n : n + 16]}) for n in range(0, len(images), 16))
    )
    return np.concatenate([next(iter(r.outputs.values())).argmax(axis=1) for r in found])


async def observed(engine: Engine, count: int) -> None:
    """Wait until the controller has seen so many samples."""

    def enough() -> bool:
        control = engine.statistics()["fashion"].control
        assert control is not None
        return control.observed >= count

    await until(enough)


def noise(count: int) -> NDArray[np.uint8]:
    """Images like none that the model was made for."""
    blocks = np.random.default_rng(0).integers(0, 256, (count, 1, 7, 7), np.uint8)
    return blocks.repeat(4, axis=2).repeat(4, axis=3)


def test_final_answers_are_the_unmodified_models(bundle_path: Path) -> None:
    source: list[NDArray[Any]] = []

    async def off(engine: Engine) -> None:
        source.append((await engine.infer("fashion", {"image": IMAGES[:200]})).outputs["logits"])

    async def release(engine: Engine) -> None:
        stream = engine.infer_stream("fashion", {"image": IMAGES[:200]})
        early, late = [result async for result in stream]
        assert early.kind is ResultKind.EARLY
        assert (early.exits >= 0).any()
        # A stage that ends elsewhere sums in another order: some ulps of logits of about 10.
        left = early.exits >= 0
        np.testing.assert_allclose(late.outputs["logits"], source[0], rtol=1e-3, atol=1e-3)
        assert late.final.all()
        different = early.outputs["logits"].argmax(axis=1) != source[0].argmax(axis=1)
        assert np.array_equal(late.corrected, different & left)
        await observed(engine, 200)
        control = engine.statistics()["fashion"].control
        assert control is not None
        assert (control.audited, control.disagreed) == (int(left.sum()), int(different.sum()))

    with_engine(bundle_path, Mode.OFF, off)
    with_engine(bundle_path, Mode.RELEASE, release)


@pytest.mark.parametrize("mode", [Mode.RELEASE, Mode.AUDIT])
def test_what_is_unlike_everything_known_switches_the_exits_off(
    bundle_path: Path, mode: Mode
) -> None:
    async def body(engine: Engine) -> None:
        await ask(engine, IMAGES[:500])
        images, asked = noise(400), 500
        while not (control := engine.statistics()["fashion"].control).alarms:  # type: ignore[union-attr]
            await ask(engine, images)
            asked += len(images)
            await observed(engine, asked)
        assert control is not None
        assert control.evidence in (Evidence.CONSERVATIVE, Evidence.CERTIFIED)
        await until(lambda: engine.model("fashion").policy.version > 1)

    with_engine(bundle_path, mode, body, audit_budget=0.5)


def test_what_was_learned_survives_a_restart(bundle_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "copy.ee"
    shutil.copytree(bundle_path, path)

    async def first(engine: Engine) -> None:
        await ask(engine, IMAGES[:320])
        await observed(engine, 320)

    async def second(engine: Engine) -> None:
        control = engine.statistics()["fashion"].control
        assert control is not None
        assert control.observed == 320

    async def other(engine: Engine) -> None:
        control = engine.statistics()["fashion"].control
        assert control is not None
        assert control.observed == 0

    with_engine(path, Mode.AUDIT, first, keep_state=True)
    assert [p.name for p in tmp_path.glob("*.npz")] == [
        f"copy.ee.fashion@{platform.node()}.state.npz"
    ]
    with_engine(path, Mode.AUDIT, second, keep_state=True)
    with_engine(path, Mode.AUDIT, other, keep_state=True, max_disagreement=0.02)
    Bundle.open(path)  # untouched


def test_deployments_share_stages_and_speeds(fashion: Bundle) -> None:
    backend = make_backend(threads=1)
    options = ModelOptions(max_batch_size=4)
    deployments = DeploymentMaker(
        fashion, backend, fashion.profile(), mode=Mode.AUDIT, options=options
    )
    everything = tuple(range(len(fashion.manifest.exits)))
    first = deployments.make(in_shadow_mode(1, everything[-1:]))
    first.points.latencies.calibrate(1.5)
    assert deployments.prepared(everything[-1:])
    assert not deployments.prepared(everything)
    deployments.prepare(everything)
    assert deployments.prepared(everything)
    second = deployments.make(in_shadow_mode(2, everything), first)
    assert (second.number, second.plan.exits) == (first.number + 1, everything)
    assert second.points.latencies.speed == 1.5
    aggressive = ExitPolicy(
        version=3, active=tuple(ActiveExit(exit=e, threshold=0.5) for e in everything)
    )
    third = deployments.make(aggressive, second)
    assert third.points.latencies is second.points.latencies
    slot = backend.open_slot()
    images = {"image": IMAGES[:8]}
    (whole,) = first.pipeline.run(slot, images)
    (split,) = second.pipeline.run(slot, images)
    np.testing.assert_allclose(split.answer, whole.answer, rtol=1e-3, atol=1e-3)
    assert sum(len(part.rows) for part in third.pipeline.run(slot, images)) == 8
    assert zeros(fashion.manifest, 3)["image"].shape == (3, 1, 28, 28)


def in_shadow_mode(version: int, exits: tuple[int, ...]) -> ExitPolicy:
    return ExitPolicy(
        version=version, active=tuple(ActiveExit(exit=e, threshold=NEVER) for e in exits)
    )
