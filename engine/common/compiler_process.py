"""Runs the compiler in a separate process; the engine knows only the compiler's command line."""

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
"""Largest number of characters shown of the last line that a failed build printed."""


class BuildProcess:
    """An ``eecompile`` process; OSError if the system cannot start it."""

    def __init__(self, arguments: Sequence[str], *, worker: str | None = None) -> None:
        """Start a module, by default the build worker, with arguments for ``eecompile``."""
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by end()
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-P", "-m", worker or _WORKER, *arguments],
                stdin=subprocess.PIPE,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                env=environment_of_child(),
                creationflags=getattr(subprocess, "BELOW_NORMAL_PRIORITY_CLASS", 0),
            )
        except BaseException:
            self._output.close()
            raise

    def poll(self) -> int | None:
        """Return the exit status; ``None`` while the process runs."""
        return self._process.poll()

    def wait(self) -> int:
        """Wait for the end, and return the exit status; another thread may kill the process."""
        return self._process.wait()

    def last_words(self, most: int = _SHOWN) -> str:
        """Return the last line of the process's output: the compiler's error, if there is one."""
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").split("\n")
        said = [line.strip() for line in lines if line.strip()]
        ours = [line for line in said if line.startswith("eecompile: ")]
        return (ours or said or ["no output"])[-1][:most]

    def lines(self, prefix: str) -> list[str]:
        """Return the lines of the process's output that begin with a prefix, without the prefix."""
        self._output.seek(0)
        said = self._output.read().decode(errors="replace").splitlines()
        return [line.removeprefix(prefix) for line in said if line.startswith(prefix)]

    def end(self) -> None:
        """Kill the process; the files that it wrote are complete at any time."""
        with contextlib.suppress(OSError):
            self._process.kill()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        if not self._output.closed:
            self._output.close()
