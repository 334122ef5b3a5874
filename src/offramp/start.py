"""The commands of the installed package, up to the point where anything large is imported.

Imports take a second or more, and end in a traceback, or a crash of a native library, where they
are interrupted or have no room. So the signal and the limit are looked at before, by a module that
imports next to nothing itself.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys

EXIT_CANNOT_START = 1
EXIT_INTERRUPTED = 130
"""What shells give for a process that an interrupt ended."""
_LEAST_MIB = {"eecompile": 3072, "eeserve": 1280, "eeworker": 1280}
"""Address space that a command needs for a small model. On Linux x86-64 with 2 cores, compiling the
shipped example took 2522 MiB at most; serving it went well in 1074 MiB, and crashed in 879."""

_LEAST_TO_HELP_MIB = 256
"""The same for imports and ``--help``, which took 190 MiB at most there."""
_LEAST_TO_INSPECT_MIB = 1024
"""The same for ``eecompile inspect``: the shipped example's model went well, and crashed in 704."""


def eecompile() -> int:
    """Run ``eecompile``; gives the exit status."""
    return _run("eecompile", "offramp.compiler.cli")


def eeserve() -> int:
    """Run ``eeserve``; gives the exit status."""
    return _run("eeserve", "offramp.server.cli")


def eeworker() -> int:
    """Run ``eeworker``; gives the exit status."""
    return _run("eeworker", "offramp.engine.remote.eeworker")


def _run(command: str, module: str) -> int:
    # One that is ignored, as shells do for background jobs, stays so.
    interruptible = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    if interruptible:
        # No exception: native modules that are half imported do not survive one.
        signal.signal(signal.SIGINT, lambda *_: _leave(f"{command}: interrupted before it began"))
    if reason := too_little_memory(_least_mib(command, sys.argv[1:])):
        sys.stderr.write(f"{command}: {reason}\n")
        return EXIT_CANNOT_START
    try:
        main = importlib.import_module(module).main
        if interruptible:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        status: int = main()
    except KeyboardInterrupt:
        sys.stderr.write(f"{command}: interrupted\n")
        return EXIT_INTERRUPTED
    except MemoryError:
        sys.stderr.write(f"{command}: there is not enough memory; see ulimit -v, and free some\n")
        return EXIT_CANNOT_START
    return status


def _least_mib(command: str, arguments: list[str]) -> int:
    """Glance at the command line, which is parsed after the imports, for what it takes."""
    if not {"-h", "--help"}.isdisjoint(arguments):
        return _LEAST_TO_HELP_MIB
    if command == "eecompile" and arguments[:1] == ["inspect"]:
        return _LEAST_TO_INSPECT_MIB
    return _LEAST_MIB[command]


def _leave(reason: str) -> None:
    os.write(2, f"{reason}\n".encode())
    os._exit(EXIT_INTERRUPTED)


def too_little_memory(least_mib: int) -> str | None:
    """Say that the limit on address space is too low, where there is one that is."""
    try:
        import resource  # noqa: PLC0415 - there is none on Windows
    except ImportError:
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit in (resource.RLIM_INFINITY, -1) or limit >= least_mib * 2**20:
        return None
    return (
        f"the limit on address space is {limit // 2**20} MiB, expected {least_mib} MiB or more; "
        f"raise it: ulimit -v {least_mib * 2**10}, or unlimited"
    )
