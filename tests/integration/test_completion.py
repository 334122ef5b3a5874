"""Shell completion of the installed commands, as argcomplete's code for bash asks for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def completions(line: str, folder: Path) -> set[str]:
    """Return the answer to a shell that completes a line."""
    command, answer = line.partition(" ")[0], folder / "answer"
    asking = {
        "_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_SUPPRESS_SPACE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer), "_ARGCOMPLETE_SHELL": "bash",
        "COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", f"from offramp import start; start.{command}()"],
        env={**os.environ, **asking}, cwd=folder, capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    return set(answer.read_text().split())


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "eeserve m.ee --mo",
            {"--mode", "--model", "--model-control", "--model-repository", "--model-versions"},
        ),
        ("eeserve mod", {"model.onnx"}),
        ("eeserve m.ee --backend open", {"openvino"}),
        ("eeserve m.ee --mode a", {"audit"}),
        ("eeserve m.ee --policy slack", {"slackfit", "slackfit-bare"}),
        ("eeworker m.ee --tls-c", {"--tls-cert", "--tls-ca"}),
        ("eebench com", {"compare"}),
        ("eecompile insp", {"inspect"}),
        ("eecompile m.onnx --max-dis", {"--max-disagreement"}),
        ("eebench compare m.ee --batch", {"--batch-sizes"}),
        ("eebench compare m.ee --backend ten", {"tensorrt"}),
    ],
)
def test_a_shell_is_answered(line: str, expected: set[str], tmp_path: Path) -> None:
    (tmp_path / "model.onnx").touch()
    assert completions(line, tmp_path) == expected
