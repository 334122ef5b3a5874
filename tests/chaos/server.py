"""``eeserve`` whose backend fails on request: ``python -m tests.chaos.server ARGUMENTS``.

Everything else that goes wrong in a chaos run is real (signals, limits of the system), but a CPU
does not fail when asked to. So each run of a stage looks for a file, and fails at times while it is
there.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path
from typing import Any, Final

from offramp.engine.backends.host import HostSlot
from offramp.engine.common.errors import BackendError
from offramp.engine.stages.backend_protocol import StageResult
from offramp.server.cli import main

SWITCH: Final = "CHAOS_BACKEND_FAILS"
"""Environment variable: the path of the file that makes the backend fail while it exists."""
SHARE: Final = 0.3
"""Share of the runs that fail then."""
FAULT: Final = "a fault that the chaos harness injected"


def fail_on_request(switch: Path) -> None:
    """Make every slot's ``run`` fail randomly while ``switch`` exists."""
    run = HostSlot.run
    name = str(switch)
    draw = random.random

    def failing(self: HostSlot, *arguments: Any) -> StageResult:
        if os.path.exists(name) and draw() < SHARE:  # noqa: PTH110 - thrice as fast as Path's
            raise BackendError(FAULT)
        return run(self, *arguments)

    HostSlot.run = failing  # type: ignore[method-assign]


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it would be none that asks to leave
    fail_on_request(Path(os.environ[SWITCH]))
    sys.exit(main())
