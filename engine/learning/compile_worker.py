"""The process that compiles during serving: ``python -m … CORES idle|nice …``.

It runs ``eecompile`` with the remaining arguments, on this number of cores, and ends when its
standard input closes, as :mod:`offramp.engine.common.build_worker` does.

With ``idle``, its threads run only while no other thread needs their core (SCHED_IDLE, or niceness
19 where SCHED_IDLE is missing). On a machine that is never idle, such threads would make no
progress. ``nice`` is for such a machine: niceness 10 gives the process a small share of the
processor. Its disk accesses have idle priority. It stays in the session of the server, because
Linux shares the processor between sessions before it considers niceness.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal
import sys
from typing import Final

from offramp.engine.common.build_worker import run_compiler
from offramp.engine.common.environment import limit_cores

IDLE: Final = "idle"
NICE: Final = "nice"
_IDLE_NICENESS: Final = 19
_NICENESS: Final = 10
_IOPRIO_SET: Final = {"x86_64": 251, "aarch64": 30}
"""Number of the system call ``ioprio_set`` by machine; libc has no function for the call."""
_IOPRIO_WHO_PROCESS: Final = 1
_IOPRIO_IDLE: Final = 3 << 13


def main() -> None:
    """Run the compiler; its exit status is that of this process."""
    cores, priority = int(sys.argv.pop(1)), sys.argv.pop(1)
    leave_processor(priority)
    limit_cores(cores)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole foreground group
    run_compiler()


def leave_processor(priority: str) -> None:
    """Lower the priority of this process, as far as the system allows."""
    niceness = _NICENESS if priority == NICE else _IDLE_NICENESS
    try:
        if priority == IDLE:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        else:
            os.nice(niceness)
    except (AttributeError, OSError):
        with contextlib.suppress(AttributeError, OSError):
            os.nice(niceness)
    number = _IOPRIO_SET.get(platform.machine()) if sys.platform == "linux" else None
    if number is not None:
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).syscall(number, _IOPRIO_WHO_PROCESS, 0, _IOPRIO_IDLE)


if __name__ == "__main__":
    main()
