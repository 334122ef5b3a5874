"""The compiler in a process of its own: the engine knows its command line, and nothing else."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Final

from offramp.engine.common.job_runner import environment_of_child

_STOP_S: Final = 5.0
_WORKER: Final = "offramp.engine.common.build_worker"
_SHOWN: Final = 300
"""Characters of what a build that failed said last."""


class BuildProcess:
    """``eecompile`` in a process of its own; OSError if the system refuses to start it."""

    def __init__(self, arguments: Sequence[str], *, worker: str | None = None) -> None:
        """Run a module, by default that of builds, with arguments for ``eecompile``."""
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed by end()
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-P", "-m", worker or _WORKER, *arguments],
                stdin=subprocess.PIPE,
                stdout=self._said,
                stderr=subprocess.STDOUT,
                env=environment_of_child(),
                creationflags=getattr(subprocess, "BELOW_NORMAL_PRIORITY_CLASS", 0),
            )
        except BaseException:
            self._said.close()
            raise

    def poll(self) -> int | None:
        """Give the exit status, ``None`` before the end."""
        return self._process.poll()

    def wait(self) -> int:
        """Wait for the end, and return the exit status; any thread may kill it meanwhile."""
        return self._process.wait()

    def last_words(self, most: int = _SHOWN) -> str:
        """Return the last line of its output, the compiler's error where there is one."""
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").split("\n")
        said = [line.strip() for line in lines if line.strip()]
        ours = [line for line in said if line.startswith("eecompile: ")]
        return (ours or said or ["nothing was said"])[-1][:most]

    def lines(self, prefix: str) -> list[str]:
        """Return the lines of its output that begin with a prefix, without it."""
        self._said.seek(0)
        said = self._said.read().decode(errors="replace").splitlines()
        return [line.removeprefix(prefix) for line in said if line.startswith(prefix)]

    def end(self) -> None:
        """Kill it: what it leaves behind is whole at any time."""
        with contextlib.suppress(OSError):
            self._process.kill()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        if not self._said.closed:
            self._said.close()
