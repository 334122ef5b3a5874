"""A worker that is slow has fewer batches: streams take what waits when they are free."""

from __future__ import annotations

import asyncio
import threading

from tests.cluster.remote.listening import ThreadLauncher
from tests.cluster.remote.workers import serve
from tests.fakes import script
from tests.unit.engine.serving import LIMIT_S

from offramp.cluster.remote.worker_backend import RemoteBackend
from offramp.engine.core import Engine
from offramp.testing.backend import SCRIPT
from offramp.testing.scripted_worker import Faults, ScriptedBackend

SLOWER = 5
REQUESTS = 120


class Pace:
    """Makes one worker run one stage while others run several; counts the runs of each."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.fast = self.slow = 0
        self.last = False
        """True if too few are left to wait for."""

    def fast_run(self) -> None:
        with self._changed:
            self.fast += 1
            self._changed.notify_all()

    def slow_run(self) -> None:
        with self._changed:
            self.slow += 1
            until = self.fast + SLOWER
            assert self._changed.wait_for(lambda: self.last or self.fast >= until, LIMIT_S)

    def end(self) -> None:
        with self._changed:
            self.last = True
            self._changed.notify_all()


class Paced(Faults):
    """Calls a function at each run."""

    def __init__(self, run: object) -> None:
        super().__init__(None)
        self._run = run

    def __call__(self, point: str) -> None:
        assert callable(self._run)
        if point == "mid-run":
            self._run()


def test_a_worker_that_is_five_times_slower_has_a_sixth_of_the_batches() -> None:
    pace = Pace()
    launchers = [
        ThreadLauncher(lambda _hello: ScriptedBackend(Paced(pace.fast_run))),
        ThreadLauncher(lambda _hello: ScriptedBackend(Paced(pace.slow_run))),
    ]
    backend = RemoteBackend(ScriptedBackend(), launchers=launchers, least_s=LIMIT_S)

    async def body(engine: Engine) -> None:
        asked = [
            asyncio.ensure_future(engine.infer("fake", {SCRIPT: script([0.95, 0.0, 0.0])}))
            for _ in range(REQUESTS)
        ]
        for count, done in enumerate(asyncio.as_completed(asked), 1):
            assert (await done).exits.tolist() == [0]
            if count >= REQUESTS - SLOWER - 1:
                pace.end()

    serve(backend, body, streams=2, max_batch_size=1)
    backend.close()
    assert pace.fast + pace.slow == REQUESTS
    # Each of the slow one's runs but the last few spans five of the other's.
    assert 0 < SLOWER * (pace.slow - SLOWER - 2) <= pace.fast
