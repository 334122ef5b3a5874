"""``eeserve --self-check``: checks what would be served, says how it went, and serves nothing."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from offramp.engine.onnx_files import WrappedFiles
from offramp.engine.self_check import run_self_check
from offramp.engine.serving.opening import bundles_of
from offramp.server.arguments import Arguments

EXIT_PASSED = 0
EXIT_FAILED = 1


def self_check(arguments: Arguments) -> int:
    """Run the check, a line a result on standard output; 0 if nothing failed, else 1.

    The report is written to the file that ``--json`` names, if it does. Ends the process where a
    check does not end: a kernel that never comes back keeps every other way out.

    Raises:
        BundleError, EngineError: Nothing could be checked.
    """
    with _bundles(arguments) as bundles:
        report = run_self_check(bundles, arguments.engine, say=_say)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report.document(), indent=1) + "\n")
        _say(f"the report is in {arguments.json}")
    elif not report.passed:
        _say("with --json FILE everything that was measured is written: please send it to us")
    status = EXIT_PASSED if report.passed else EXIT_FAILED
    if report.hangs:
        sys.stderr.flush()
        os._exit(status)
    return status


@contextmanager
def _bundles(arguments: Arguments) -> Iterator[dict[str, Path]]:
    """Yield the paths of the bundles to check; ONNX files are wrapped as for serving."""
    with closing(WrappedFiles()) as wrapped:
        yield asyncio.run(bundles_of(arguments.models, arguments.engine, wrapped))


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()  # whoever waits a minute wants to see each as it comes
