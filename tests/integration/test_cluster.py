"""A model that no worker has room for is split among several, and answers as it always does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.small import compile_small

from offramp.bundle import Bundle
from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend
from offramp.engine.cluster_serving import ServedCluster
from offramp.engine.core import Engine
from offramp.engine.errors import OptionsError
from offramp.engine.options import EngineOptions, ModelOptions
from offramp.engine.plan import Mode
from offramp.engine.planning.cluster import Cluster, DeviceType
from offramp.engine.planning.cluster_times import times_of
from offramp.engine.planning.goal import PlanningGoal
from offramp.engine.remote.backend import RemoteBackend
from offramp.engine.remote.launching import LocalLauncher
from offramp.engine.results import EngineResult

ROWS = 8


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, Path]:
    return compile_small(tmp_path_factory.mktemp("small"))


def cluster_for(bundle: Bundle, *, share: float) -> ServedCluster:
    """Two types of device, with room for so much of the weights each."""
    total = sum(s.weight_bytes or 0 for s in bundle.manifest.segments)
    types = [
        DeviceType(
            name=name,
            count=2,
            cost_per_hour=1.0,
            times=times_of(bundle.profile(), ROWS, speed=speed),
            memory_bytes=share * total,
        )
        for name, speed in (("fast", 2.0), ("slow", 1.0))
    ]
    goal = PlanningGoal(batch_sizes=(1, 2, 4, ROWS))
    return ServedCluster(cluster=Cluster(types=tuple(types)), goal=goal)


def answers(
    bundle: Bundle,
    requests: Sequence[np.ndarray],
    *,
    kinds: Sequence[str] = (),
    cluster: ServedCluster | None = None,
    mode: Mode = Mode.LEAVE,
) -> tuple[list[EngineResult], list[int]]:
    """Serve by workers of these kinds, or in this process; and how many stages each then has."""
    options = EngineOptions(
        mode=mode,
        streams=max(len(kinds), 1),
        threads=1,
        plan_on=cluster,
        keep_state=False,
        defaults=ModelOptions(max_batch_size=ROWS),
    )

    async def serve() -> tuple[list[EngineResult], list[int]]:
        backend = OnnxRuntimeBackend(threads=1)
        workers = RemoteBackend(
            backend, launchers=[LocalLauncher(device_type=kind) for kind in kinds], threads=1
        )
        try:
            async with await Engine.open(
                {"small": bundle.path}, options, backend=workers if kinds else backend
            ) as engine:
                asked = [engine.infer("small", {"x": rows}) for rows in requests]
                held = [len(seat.worker.stages) for seat in workers._seats if seat.worker]
                return list(await asyncio.gather(*asked)), held
        finally:
            workers.close()

    return asyncio.run(serve())


@pytest.mark.parametrize("mode", [Mode.LEAVE, Mode.AUDIT])
def test_a_split_model_answers_as_in_one_process(
    small: tuple[Bundle, Path], mode: Mode, caplog: pytest.LogCaptureFixture
) -> None:
    bundle, inputs = small
    with np.load(inputs) as archive:
        requests = np.array_split(archive["x"][:120], 40)
    kinds = ["slow", "fast", "slow", "fast"]
    with caplog.at_level(logging.INFO):
        found, held = answers(
            bundle, requests, kinds=kinds, cluster=cluster_for(bundle, share=0.7), mode=mode
        )
    expected, _ = answers(bundle, requests, mode=mode)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.exits, other.exits)
        (name,) = one.outputs
        np.testing.assert_allclose(one.outputs[name], other.outputs[name], rtol=1e-5, atol=1e-6)
    assert "segments 0 to" in caplog.text, "the plan is told"
    assert "policy refill, as run-through never merges" in caplog.text
    assert 0 < min(held) < max(len(bundle.policy.active) + 1, *held)


def test_what_fits_nowhere_is_refused(small: tuple[Bundle, Path]) -> None:
    bundle, inputs = small
    with np.load(inputs) as archive:
        requests = [archive["x"][:1]]
    with pytest.raises(OptionsError, match=r"small: memory: .* do not fit on 1 devices"):
        answers(bundle, requests, kinds=["slow"], cluster=cluster_for(bundle, share=0.2))
    cluster = cluster_for(bundle, share=2.0)
    with pytest.raises(OptionsError, match=r"workers are of types \['gpu'\]"):
        answers(bundle, requests, kinds=["gpu"], cluster=cluster)
    late = replace(cluster, goal=replace(cluster.goal, slo_s=1e-9))
    with pytest.raises(OptionsError, match="latency: no plan is faster than"):
        answers(bundle, requests, kinds=["slow"], cluster=late)
