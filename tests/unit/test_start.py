"""A command that is interrupted or has no room before its imports ends in one line."""

from __future__ import annotations

import resource
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(code: str, folder: Path, limit_mib: int | None = None) -> subprocess.CompletedProcess[str]:
    def limit() -> None:
        if limit_mib is not None:
            resource.setrlimit(resource.RLIMIT_AS, (limit_mib * 2**20, limit_mib * 2**20))

    return subprocess.run(
        [sys.executable, "-c", f"import sys\nfrom offramp import start\n{code}"],
        cwd=folder, capture_output=True, text=True, check=False, preexec_fn=limit, timeout=120,
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


@pytest.mark.parametrize("command", ["eeserve", "eecompile", "eeworker"])
def test_too_small_a_limit_on_memory_is_told_before_it_is_met(tmp_path: Path, command: str) -> None:
    done = run(f"sys.exit(start.{command}())", tmp_path, limit_mib=512)
    assert done.returncode == 1
    assert done.stderr.startswith(f"{command}: the limit on address space is 512 MiB, expected ")
    assert "raise it: ulimit -v " in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("eeserve", ["--help"]),
        ("eeworker", ["--help"]),
        ("eecompile", ["-h"]),
        ("eecompile", ["build", "--help"]),
        ("eecompile", ["inspect", "nothing.onnx"]),
    ],
)
def test_what_takes_little_memory_asks_for_little(
    tmp_path: Path, command: str, arguments: list[str]
) -> None:
    code = f"sys.argv[1:] = {arguments}\nsys.exit(start.{command}())"
    done = run(code, tmp_path, limit_mib=1024)
    assert "limit on address space" not in done.stderr
    told = done.stdout if arguments[-1].startswith("-") else done.stderr
    assert told.startswith(("usage: ", "eecompile: nothing.onnx: cannot be read: No such file"))
    done = run(code, tmp_path, limit_mib=200)
    assert done.returncode == 1
    assert done.stderr.startswith(f"{command}: the limit on address space is 200 MiB, expected ")
    assert done.stderr.count("\n") == 1


def test_a_large_limit_and_none_are_fine(tmp_path: Path) -> None:
    told = run("print(start.too_little_memory(64), start.too_little_memory(2**20))", tmp_path, 512)
    assert told.stdout.startswith("None the limit on address space is 512 MiB, expected 1048576")
    assert run("print(start.too_little_memory(64))", tmp_path).stdout == "None\n"


def test_the_installed_commands_start_there() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts["eecompile"] == "offramp.start:eecompile"
    assert scripts["eeserve"] == "offramp.start:eeserve"
    assert scripts["eeworker"] == "offramp.start:eeworker"
