"""Writes a bundle over and over, each time killed one system call later; run as a program.

    python -m tests.unit.bundle.killed_writer FOLDER [exchange|rename]

Each attempt is a forked process that kills itself (SIGKILL) before its k-th call of the system that
Python audits, k from 1 until one lives to the end. After each, what is at the target is opened.
Prints a JSON list of what was found: "none", "old", "new", "aside" (nothing, but the error names
where the old one is, and it is whole there), or what is wrong.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

from tests.unit.bundle.examples import POLICY, write

from offramp.bundle import Bundle, BundleError, BundleNotFoundError, ExitPolicy, files

NEW = ExitPolicy(version=2, active=())
_COUNTED = ("open", "os.", "shutil.", "tempfile.", "ctypes.")


def _kill_at(step: int) -> None:
    left = step

    def count(event: str, _: object) -> None:
        nonlocal left
        if event.startswith(_COUNTED):
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def _found(folder: Path) -> str:
    target = folder / "small.ee"
    try:
        policy = Bundle.open(target).policy
    except BundleNotFoundError as error:
        if target.exists():
            return str(error)
        named = re.search(r"mv (\S+) ", str(error))
        if named is None:
            return "none"
        return "aside" if Bundle.open(named[1]).policy == POLICY else str(error)
    except BundleError as error:
        return str(error)
    return {POLICY: "old", NEW: "new"}[policy]


def main(folder: Path, how: str) -> None:
    """Kill writers until one lives; ``how`` is ``first`` where no bundle is there before."""
    if how == "rename":
        files.exchange = lambda *_: False  # type: ignore[assignment]
    found: list[str] = []
    status = -1
    while status:
        shutil.rmtree(folder)
        folder.mkdir()
        if how != "first":
            write(folder)
        child = os.fork()
        if not child:
            _kill_at(len(found) + 1)
            write(folder, policy=NEW, overwrite=True)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        found.append(_found(folder))
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
