"""Actions of commands before anything large is imported."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"import sys\nfrom offramp import start\n{code}"],
        cwd=folder, capture_output=True, encoding="utf-8", errors="replace", check=False,
        timeout=120, env={**os.environ, **environment},
    )  # fmt: skip


def test_an_interrupt_while_modules_are_imported_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "large.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n"
        "except BaseException as error:\n    raise ImportError('half of it') from error\n"
    )
    done = run("sys.exit(start._run('eecompile', 'large'))", tmp_path)
    assert (done.returncode, done.stderr) == (130, "eecompile: interrupted before it began\n")


@pytest.mark.parametrize(("ignored", "told"), [(True, "[True, True]"), (False, "[False, False]")])
def test_an_interrupt_that_is_ignored_stays_so(tmp_path: Path, ignored: bool, told: str) -> None:
    (tmp_path / "large.py").write_text(
        "import signal\ndef found():\n"
        "    return signal.getsignal(signal.SIGINT) is signal.SIG_IGN\n"
        "first = found()\ndef main():\n    print([first, found()])\n    return 0\n"
    )
    how = "SIG_IGN" if ignored else "default_int_handler"
    code = f"import signal\nsignal.signal(signal.SIGINT, signal.{how})"
    done = run(f"{code}\nsys.exit(start._run('eecompile', 'large'))", tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{told}\n")


@pytest.mark.parametrize(
    ("raised", "status", "line"),
    [("KeyboardInterrupt", 130, "interrupted"), ("MemoryError", 1, "there is not enough memory;")],
)
def test_what_a_command_raises_at_last_is_one_line(
    tmp_path: Path, raised: str, status: int, line: str
) -> None:
    (tmp_path / "large.py").write_text(f"def main():\n    raise {raised}\n")
    done = run("sys.exit(start._run('eeserve', 'large'))", tmp_path)
    assert done.returncode == status
    assert done.stderr.startswith(f"eeserve: {line}")
    assert done.stderr.count("\n") == 1


def test_a_command_gives_the_status_of_its_module(tmp_path: Path) -> None:
    (tmp_path / "large.py").write_text("def main():\n    return 7\n")
    assert run("sys.exit(start._run('eeserve', 'large'))", tmp_path).returncode == 7


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8"])
def test_characters_that_a_stream_cannot_encode_are_spelled(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "large.py").write_text(
        "import sys\ndef main():\n"
        "    print('≥ 1 % … ✓')\n    print('≥ 1 % … ✓', file=sys.stderr)\n    return 0\n"
    )
    code = "sys.exit(start._run('eecompile', 'large'))"
    done = run(code, tmp_path, PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stdout) == (0, done.stderr)
    expected = "≥ 1 % … ✓" if encoding == "utf-8" else ">= 1 % ... ?"
    if encoding == "cp1252":  # which has an ellipsis
        expected = ">= 1 % … ?"
    assert done.stdout == f"{expected}\n".encode(encoding).decode("utf-8", "replace")


@pytest.mark.parametrize("command", ["eecompile", "eeserve", "eeworker", "eebench"])
def test_the_installed_commands_start_there(command: str, tmp_path: Path) -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts[command] == f"offramp.start:{command}"
    done = run(f"sys.argv = ['any', '--help']\nsys.exit(start.{command}())", tmp_path)
    assert (done.returncode, done.stdout.split()[:2]) == (0, ["usage:", command])


@pytest.mark.parametrize(("own", "found"), [(None, "1"), ("0", "0")])
def test_nothing_reports_to_the_makers_of_onnxruntime(
    tmp_path: Path, own: str | None, found: str
) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "ORT_DISABLE_TELEMETRY"}
    code = (
        "import os, offramp, onnxruntime\nprint(os.environ['ORT_DISABLE_TELEMETRY'])\n"
        f"assert {own == '0'} or not os.listdir('.'), 'its session file'"
    )
    environment |= {"TMPDIR": str(tmp_path)} | ({"ORT_DISABLE_TELEMETRY": own} if own else {})
    for name in ("CI", "GITHUB_ACTIONS"):  # there it is off anyway
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True,
        check=False, timeout=120,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == (f"{found}\n", "")
