"""The commands of the installed package, up to the point where anything large is imported.

Imports take a second or more, and end in a traceback, or a crash of a native library, where they
are interrupted. So signals and output are set up before, by a module that imports next to nothing
itself.
"""

from __future__ import annotations

import codecs
import importlib
import io
import os
import signal
import sys

EXIT_CANNOT_START = 1
EXIT_INTERRUPTED = 130
"""Exit status that shells give for a process that an interrupt ended."""
_SPELLINGS = {
    "≥": ">=", "≤": "<=", "≈": "~", "±": "+-", "×": "x", "−": "-", "–": "-", "…": "...", "→": "->",
    "·": "*", "µ": "u", "²": "^2",
}  # fmt: skip
"""ASCII spellings of what our output has; any other character becomes a question mark."""


def eecompile() -> int:
    """Run ``eecompile``; return the exit status."""
    return _run("eecompile", "offramp.compiler.commands.cli")


def eeserve() -> int:
    """Run ``eeserve``; return the exit status."""
    return _run("eeserve", "offramp.server.cli")


def eeworker() -> int:
    """Run ``eeworker``; return the exit status."""
    return _run("eeworker", "offramp.cluster.remote.eeworker")


def eebench() -> int:
    """Run ``eebench``; return the exit status."""
    return _run("eebench", "offramp.tools.bench.cli")


def _run(command: str, module: str) -> int:
    # One that is ignored, as shells do for background jobs, stays so.
    interruptible = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    if interruptible:
        # No exception: native modules that are half imported do not survive one.
        signal.signal(signal.SIGINT, lambda *_: _leave(f"{command}: interrupted before it began"))
    escape_unencodable_output()
    try:
        main = importlib.import_module(module).main
        if interruptible:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        status: int = main()
    except KeyboardInterrupt:
        sys.stderr.write(f"{command}: interrupted\n")
        return EXIT_INTERRUPTED
    except MemoryError:
        sys.stderr.write(f"{command}: there is not enough memory; free some\n")
        return EXIT_CANNOT_START
    return status


def escape_unencodable_output() -> None:
    """Let standard output and error spell characters that their encoding does not have.

    A redirected Windows console (cp1252), an ISO-8859-1 locale or ``PYTHONIOENCODING=ascii`` would
    raise UnicodeEncodeError in the middle of a command otherwise.
    """
    codecs.register_error("offramp.spell", _spell)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="offramp.spell")


def _spell(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    unknown = error.object[error.start : error.end]
    return "".join(_SPELLINGS.get(character, "?") for character in unknown), error.end


def _leave(reason: str) -> None:
    os.write(2, f"{reason}\n".encode())
    os._exit(EXIT_INTERRUPTED)
