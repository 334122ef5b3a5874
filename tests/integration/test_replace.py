"""Bundles are replaced while real requests come, on ONNX Runtime."""

from __future__ import annotations

import asyncio
import gc
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cluster.loops import profiles_of
from tests.engines import half_leave
from tests.models import mlp
from tests.serving_checks import MODEL, Truth, options, replaced
from tests.sliced import inputs_of, slice_proto
from tests.unit.engine.serving import until

from offramp.bundle import ActiveExit, Bundle, BundleError
from offramp.cluster.remote.launching import LocalLauncher, worker_command
from offramp.cluster.remote.worker_backend import RemoteBackend
from offramp.cluster.serving.cluster_options import NAME, ClusterOptions
from offramp.cluster.serving.cluster_statistics import profile_of
from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend
from offramp.engine.core import Engine
from offramp.engine.models import served_model
from offramp.engine.models.options import ModelOptions
from offramp.engine.scheduling.policies import PolicyName
from offramp.engine.serving.totals import totals_of
from offramp.engine.stages.plan import Mode
from offramp.tools.gpu.staged import plain_bundle

SHORT = {NAME: ClusterOptions(profile_window_s=1.0)}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> list[Bundle]:
    """Two models of the same inputs and outputs that answer nothing alike."""
    folder = tmp_path_factory.mktemp("bundles")
    made = []
    for layers, after in ((3, (0, 1)), (5, (2, 3))):
        pieces = slice_proto(mlp(layers=layers))
        inputs = inputs_of(pieces, 256)
        exits = {"exits_after": after, "active": (ActiveExit(exit=0, threshold=0.5),)}
        path = folder / f"m{layers}.ee"
        bundle = plain_bundle(pieces, path, inputs, **exits)
        threshold = half_leave(bundle, inputs).active[0].threshold
        exits["active"] = (ActiveExit(exit=0, threshold=threshold),)
        made.append(plain_bundle(pieces, folder / f"{layers}.ee", inputs, **exits))
    return made


@pytest.fixture(scope="module")
def truths(bundles: list[Bundle]) -> list[Truth]:
    inputs = inputs_of(slice_proto(mlp(layers=3)), 256, seed=1)
    return [Truth.of(bundle, inputs, 1e-4) for bundle in bundles]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the compiled profile: how fast this machine is does not matter here."""
    monkeypatch.setattr(served_model, "profile_here", lambda _bundle, _backend, given, **_: given)


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def threads() -> int:
    """Return the number of threads, without asyncio's pool, which grows on its own."""
    return sum(not thread.name.startswith("asyncio_") for thread in threading.enumerate())


class Held:
    """Resources of a process; each removal must restore them."""

    def __init__(self) -> None:
        self.found: list[tuple[Any, ...]] = []

    async def __call__(self, engine: Engine) -> None:
        gc.collect()
        backend = engine._backend
        assert isinstance(backend, OnnxRuntimeBackend)
        self.found.append(
            (
                descriptors(),
                threads(),
                len(backend._sessions),
                len(engine._executor._models),
                len(engine._control._states),
                len(profiles_of(engine)._recorded),
            )
        )


@pytest.mark.slow
@pytest.mark.parametrize("mode", [Mode.LEAVE, Mode.AUDIT, Mode.RELEASE])
@pytest.mark.parametrize("policy", ["run-through", "refill"])
def test_thirty_replacements_under_load_lose_nothing_and_leave_nothing(
    mode: Mode, policy: str, bundles: list[Bundle], truths: list[Truth]
) -> None:
    held = Held()
    how = options(mode, most=8)
    how = replace(how, defaults=replace(how.defaults, scheduling=PolicyName(policy)))
    asyncio.run(replaced(OnnxRuntimeBackend(), bundles, truths, how, times=30, settled=held))
    assert held.found[5::2] == held.found[3:4] * 13
    assert held.found[4::2] == held.found[2:3] * 13


def test_a_bundle_that_is_written_over_the_served_one_replaces_it(
    bundles: list[Bundle],
    truths: list[Truth],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The state learned for the previous bundle stays next to it, and the new one ignores it."""
    at = tmp_path / "served.ee"
    model = ModelOptions(max_batch_size=8, never_beyond_compiled=True)
    how = replace(options(Mode.AUDIT), keep_state=True, defaults=model)
    backend = OnnxRuntimeBackend()
    asyncio.run(replaced(backend, bundles, truths, how, times=6, at=at))
    assert "kept by another server" not in caplog.text
    assert not list(tmp_path.glob("*.lock"))
    assert len(list(tmp_path.glob("served.ee.m@*.state.npz"))) == 1


def test_workers_run_the_bundle_that_replaces_another(
    bundles: list[Bundle], truths: list[Truth]
) -> None:
    how = options(Mode.AUDIT, streams=1, most=8)
    local = OnnxRuntimeBackend()
    workers = RemoteBackend(local, launchers=[LocalLauncher(worker_command())] * 2)
    try:
        how = replace(how, streams=2)
        statistics = asyncio.run(replaced(workers, bundles, truths, how, times=4))
    finally:
        workers.close()
    assert (statistics.workers_in_service, statistics.worker_restarts) == (2, 0)


def windows(engine: Engine) -> int:
    profile = profile_of(engine.statistics()[MODEL])
    return profile.windows if profile else 0


def test_a_model_without_exits_is_replaced_by_one_with_exits(
    bundles: list[Bundle], truths: list[Truth], tmp_path: Path
) -> None:
    """Learning does this: the model is served unmodified first, and then in audit mode."""
    inputs = truths[1].inputs
    served = shutil.copytree(bundles[1].path, tmp_path / "served.ee")

    async def body() -> None:
        how = replace(options(Mode.OFF), keep_state=True, extensions=SHORT)
        async with await Engine.open({MODEL: bundles[0].path}, how) as engine:
            first = await engine.infer(MODEL, inputs)
            assert set(first.exits.tolist()) == {-1}
            await engine.replace(MODEL, served, mode=Mode.AUDIT)
            then = await engine.infer(MODEL, inputs)
            assert set(then.exits.tolist()) == {-1, 0}
            statistics = engine.statistics()[MODEL]
            assert (statistics.mode, statistics.version) == ("audit", 2)
            assert statistics.control is not None and profile_of(statistics) is not None
            total = totals_of(statistics)
            assert (total.requests, total.answered) == (2, 2 * len(truths[1]))
            await until(lambda: bool(windows(engine)))

    asyncio.run(asyncio.wait_for(body(), 60.0))
    assert len(list(tmp_path.glob("served.ee.m@*.batch-profile.json"))) == 1


def test_a_damaged_bundle_replaces_nothing(
    bundles: list[Bundle], truths: list[Truth], tmp_path: Path
) -> None:
    damaged = shutil.copytree(bundles[1].path, tmp_path / "damaged.ee")
    graph = next(path for path in sorted(damaged.rglob("*.onnx")))
    graph.write_bytes(graph.read_bytes()[:-1] + b"!")
    held = Held()

    async def body() -> None:
        async with await Engine.open(
            {MODEL: bundles[0].path}, options(Mode.AUDIT), backend=OnnxRuntimeBackend()
        ) as engine:
            rows = np.arange(8)
            for _ in range(3):
                with pytest.raises(BundleError, match=graph.name):
                    await engine.replace(MODEL, damaged)
                with pytest.raises(BundleError, match="none"):
                    await engine.replace(MODEL, tmp_path / "none.ee")
                result = await engine.infer(MODEL, truths[0].take(rows))
                truths[0].check(result, rows, [bundles[0].policy])
                await held(engine)
            assert engine.statistics()[MODEL].version == 1

    asyncio.run(body())
    assert held.found[1:] == held.found[1:2] * 2
