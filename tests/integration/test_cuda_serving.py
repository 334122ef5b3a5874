"""The engine on the fake CUDA driver: requests, batches, streams, and no leaked resources."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from tests.cuda_fakes import fake_cuda

from offramp.bundle import NEVER, ActiveExit, Bundle, ExitPolicy
from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend
from offramp.engine.core import Engine, EngineOptions
from offramp.engine.models.options import ModelOptions
from offramp.engine.stages.pipeline import Pipeline
from offramp.engine.stages.plan import Mode, make_plan

REQUESTS = 60


@pytest.mark.parametrize("mode", [Mode.LEAVE, Mode.AUDIT, Mode.RELEASE, Mode.OFF])
def test_every_request_is_answered_as_on_the_cpu(bundle_path: Path, mode: Mode) -> None:
    bundle = Bundle.open(bundle_path)
    (tensor,) = bundle.manifest.inputs
    shape = bundle.manifest.calibration.sample_shapes[tensor.name]
    rng = np.random.default_rng(0)
    samples = rng.integers(0, 256, (REQUESTS, *shape)).astype(tensor.dtype)
    backend, _, driver = fake_cuda()

    async def serve() -> list[tuple[int, np.ndarray]]:
        options = EngineOptions(
            mode=mode, streams=2, keep_state=False, defaults=ModelOptions(max_batch_size=8)
        )
        engine = await Engine.open({"m": bundle_path}, options, backend=backend)
        try:
            results = await asyncio.gather(
                *(engine.infer("m", {tensor.name: samples[i : i + 1]}) for i in range(REQUESTS))
            )
        finally:
            await engine.close()
        output = bundle.manifest.answer.output
        return [(int(r.exits[0]), r.outputs[output][0]) for r in results]

    found = asyncio.run(serve())
    assert driver.calls["launch_graph"] > 0
    backend.close()  # finds every misuse and leak

    answers = answers_of(bundle, {tensor.name: samples})
    for row, (exit_index, answer) in enumerate(found):
        # Sums are in another order where the batch has another size.
        np.testing.assert_allclose(answer, answers[exit_index][row], atol=1e-5)
    if mode is Mode.OFF:
        assert {exit_index for exit_index, _ in found} == {-1}


def answers_of(bundle: Bundle, samples: dict[str, np.ndarray]) -> dict[int, np.ndarray]:
    """Return the CPU's answers of every exit, and of the model (-1), for all samples."""
    every = tuple(ActiveExit(exit=e.index, threshold=NEVER) for e in bundle.manifest.exits)
    plan = make_plan(bundle, ExitPolicy(version=1, active=every), Mode.RELEASE)
    pipeline, slot = Pipeline(OnnxRuntimeBackend(), plan), OnnxRuntimeBackend().open_slot()
    answers, batch = {}, slot.upload(samples)
    for index, stage in enumerate(plan.stages):
        result = pipeline.step(slot, index, batch).result
        assert result.answer is not None
        answers[stage.answered_by] = result.answer
        batch = result.carry or batch
    return answers
