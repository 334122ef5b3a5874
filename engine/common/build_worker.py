"""The process that builds engines during serving: ``python -m .common.build_worker …``.

It runs ``eecompile`` with the given arguments at a lower priority, and ends when its standard input
closes: if the server is killed, no build remains that occupies GPU memory. Only the engine being
built is lost then (:mod:`offramp.bundle.engines`).

The compiler is run as a program. The engine package knows the compiler's name and command line, not
its modules, because a machine that serves may not have the compiler installed.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
from typing import Final

from offramp.engine.common.job_worker import lower_priority

_COMPILER: Final = "offramp.compiler.commands.cli"


def main() -> None:
    """Run the compiler; its exit status is that of this process."""
    lower_priority()
    run_compiler()


def run_compiler() -> None:
    """Run the compiler with the arguments of this process, until its standard input ends."""
    threading.Thread(target=_end_with_input, daemon=True).start()
    sys.argv[0] = "eecompile"
    runpy.run_module(_COMPILER, run_name="__main__", alter_sys=False)


def _end_with_input() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
