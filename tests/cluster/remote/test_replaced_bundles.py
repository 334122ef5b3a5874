"""A bundle that is replaced while it is served: workers that start then still run its stages."""

from __future__ import annotations

import logging
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from tests.cluster.remote.test_stages import GOLDEN
from tests.cluster.remote.workers import scripted_workers
from tests.facts import tells
from tests.fakes import fake_plan, script

from offramp.bundle import ActiveExit, Bundle, ExitPolicy
from offramp.certify import NEVER
from offramp.cluster.remote.launching import LocalLauncher, WorkerHandle
from offramp.cluster.remote.worker_backend import RemoteBackend
from offramp.cluster.remote.worker_slot import RemoteStage
from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend
from offramp.engine.common.errors import BackendError, WorkerLostError
from offramp.engine.stages.backend_protocol import StageResult
from offramp.engine.stages.pipeline import zeros
from offramp.engine.stages.plan import Mode, StageSpec, make_plan
from offramp.testing.backend import SCRIPT


def _remove(path: Path) -> None:
    shutil.rmtree(path)


def _replace(path: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree(GOLDEN, path)
    policy = path / "policy.json"
    policy.write_bytes(policy.read_bytes() + b"\n")


def first_run(backend: RemoteBackend, spec: StageSpec, bundle: Bundle) -> StageResult:
    slot = backend.open_slot()
    try:
        return slot.run(backend.prepare(spec), slot.upload(zeros(bundle.manifest, 2)))
    finally:
        slot.close()


@pytest.mark.parametrize("change", [_remove, _replace])
def test_workers_that_start_after_a_replacement_get_the_held_graphs(
    tmp_path: Path, change: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "model.ee"
    shutil.copytree(GOLDEN, place)
    bundle = Bundle.open(place).held()
    served = make_plan(bundle).stages[0]
    tried = ExitPolicy(version=0, active=(ActiveExit(exit=3, threshold=NEVER),))
    later = make_plan(bundle, tried, Mode.AUDIT).stages[0]
    local = OnnxRuntimeBackend()
    backend = RemoteBackend(local, launchers=[LocalLauncher()])
    try:
        before = first_run(backend, served, bundle)
        stage = backend.prepare(served)
        change(place)
        (pid,) = backend.pids
        os.kill(pid, signal.SIGKILL)
        with caplog.at_level(logging.WARNING):
            with suppress(WorkerLostError):  # or it is missed before the next run begins
                while pid in backend.pids:
                    first_run(backend, served, bundle)
            after = first_run(backend, served, bundle)
        assert stage.number in backend.alive[0].stages
        assert before.answer is not None and after.answer is not None
        np.testing.assert_array_equal(after.answer, before.answer)
        tells(caplog.text, "model.ee", "replaced or removed")
        # The graph of an exit that is tried while serving, too.
        assert first_run(backend, later, bundle).answer is not None
    finally:
        backend.close()


def test_a_worker_starts_with_the_stages_that_load(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One model's stage that no new worker can load does not keep those of another away."""
    with scripted_workers(1) as backend:
        stages = [backend.prepare(spec) for spec in fake_plan([0.9]).stages]
        load = backend._load

        def refuse(worker: WorkerHandle, stage: RemoteStage) -> None:
            if stage is stages[0]:
                raise BackendError("it does not load here")
            load(worker, stage)

        monkeypatch.setattr(backend, "_load", refuse)
        slot = backend.open_slot()
        os.kill(backend.pids[0], signal.SIGKILL)
        with pytest.raises(WorkerLostError):
            slot.run(stages[1], slot.upload({SCRIPT: script([0.5, 0.7])}))
        slot.close()
        backend.open_slot().close()
        assert backend.alive[0].stages == {stages[1].number}
        tells(caplog.text, "without a stage", "load")
