"""Fake of the compiling process: ``python -m tests.learning_worker CORES PRIORITY …``.

The file ``fake`` next to the learn folder selects its action: ``copy PATH``, a bundle that it
writes; ``fail TEXT``; ``hang``.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

from tests.learning import argument


def main() -> None:
    output = Path(argument(sys.argv, "output"))
    word, _, what = (output.parents[1] / "fake").read_text().partition(" ")
    if word == "copy":
        scratch = output.with_name(f".{output.name}.x")
        shutil.copytree(what, scratch)
        scratch.rename(output)
        return
    if word == "fail":
        sys.stderr.write(f"warning: something\neecompile: {what}\n")
        sys.exit(1)
    Path(argument(sys.argv, "progress-file")).write_text(
        '{"step": 3, "steps": 9, "title": "Hang", "share": 0.5}\n'
    )
    if not sys.stdin.buffer.read():  # until the server is gone
        return
    time.sleep(600)


if __name__ == "__main__":
    main()
