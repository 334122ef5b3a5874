"""Test files run on a temporary copy of the tree, each time in a process of its own."""

from __future__ import annotations

import compileall
import contextlib
import importlib
import json
import os
import py_compile
import re
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Final, NoReturn

from offramp.tools.mutate.changes import Mutant

_PATIENCE: Final = 100_000
"""Calls without a function that is new, after which the rest of a test is not looked at."""
_TIMES_UNCHANGED: Final = 5.0
"""How much longer than unchanged the tests of a mutant may take, besides the grace; and how much
longer than its processor time a test file, where others keep the machine busy."""


class Outcome(StrEnum):
    """What the tests said of a mutant."""

    KILLED = "killed"
    TIMED_OUT = "timed out"
    """It hung, which a test would notice; counts as killed."""
    SURVIVED = "survived"
    UNTESTED = "untested"
    """No test file enters its function or has a similar name; counts as survived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TestFile:
    """A test file as it ran unchanged."""

    __test__ = False
    file: str
    seconds: float
    passed: bool
    entered: frozenset[str]
    """``file::function`` of all that it called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A mutant, and how the tests went."""

    mutant: Mutant
    outcome: Outcome
    by: str
    """The test that failed first, or the files that passed."""
    seconds: float


class Workshop:
    """A temporary copy of a tree, and processes that test it."""

    def __init__(self, original: Path, root: Path, files: Sequence[str], *, grace_s: float) -> None:
        """Copy the tree, and compile it so that only what is changed is compiled again.

        A mutant may take ``grace_s`` longer than some times what its tests take unchanged.
        """
        self._original, self.root = original.resolve(), root.resolve()
        self._grace_s = grace_s
        for name in files:
            target = self.root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(original / name, target, follow_symlinks=False)
        by_content = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(self.root, quiet=2, invalidation_mode=by_content)

    def record(self, test: str, slowest_s: float) -> TestFile:
        """Run a test file unchanged, and note what it enters; slow is by processor time."""
        notes = self.root.with_suffix(".json")
        notes.unlink(missing_ok=True)
        started, busy_s = time.monotonic(), _busy_s()
        code, _ = self._fork(lambda: self._recorded(test, notes), _TIMES_UNCHANGED * slowest_s)
        seconds, busy_s = time.monotonic() - started, _busy_s() - busy_s
        entered = frozenset(json.loads(notes.read_text()) if notes.exists() else ())
        passed = code == 0 and busy_s <= slowest_s
        return TestFile(file=test, seconds=seconds, passed=passed, entered=entered)

    def judge(self, mutant: Mutant, groups: Iterable[Sequence[TestFile]]) -> Judged:
        """Run groups of tests on the changed file until one notices."""
        outcome, seconds, passed = Outcome.UNTESTED, 0.0, list[str]()
        for tests in groups:
            names, started = [test.file for test in tests], time.monotonic()
            limit_s = self._grace_s + _TIMES_UNCHANGED * sum(test.seconds for test in tests)
            path = self.root / mutant.file
            source = path.read_bytes()
            path.write_bytes(mutant.apply(source))
            try:
                code, output = self._fork(partial(self._pytest, names), limit_s)
            finally:
                path.write_bytes(source)
            seconds += time.monotonic() - started
            if code != 0:
                outcome = Outcome.TIMED_OUT if code is None else Outcome.KILLED
                failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
                by = failed[1] if failed else ", ".join(names)
                return Judged(mutant=mutant, outcome=outcome, by=by, seconds=seconds)
            outcome, passed = Outcome.SURVIVED, [*passed, *names]
        return Judged(mutant=mutant, outcome=outcome, by=", ".join(passed), seconds=seconds)

    def _fork(self, work: Callable[[], int], limit_s: float) -> tuple[int | None, str]:
        """Do something in a child process: its exit code, ``None`` if it hung, and its output."""
        with tempfile.TemporaryFile("w+") as output:
            sys.stdout.flush()
            child = os.fork()
            if child == 0:
                self._child(work, output.fileno())
            code, deadline_s = None, time.monotonic() + limit_s
            while code is None and time.monotonic() < deadline_s:
                time.sleep(0.02)
                pid, status = os.waitpid(child, os.WNOHANG)
                code = os.waitstatus_to_exitcode(status) if pid else None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # whatever the tests started
            if code is None:
                os.waitpid(child, 0)
            output.seek(0)
            return code, output.read()

    def _child(self, work: Callable[[], int], output: int) -> NoReturn:
        """Work in a process group of its own, never return to what the parent was at."""
        code = 70
        try:
            os.setsid()
            os.dup2(output, 1)
            os.dup2(output, 2)
            self._enter()
            code = work()
        finally:
            sys.stdout.flush()
            os._exit(code)

    def _enter(self) -> None:
        """Import from the copy from now on."""
        os.chdir(self.root)
        paths = [str(path) for path in (self.root / "src", self.root) if path.is_dir()]
        sys.path[:0] = paths
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        sys.dont_write_bytecode = True
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None) or ""
            ours = self._original in Path(file).resolve().parents
            if ours and name != "__main__" and "site-packages" not in file:
                del sys.modules[name]

    def _pytest(self, tests: Sequence[str], *plugins: object) -> int:
        import pytest  # noqa: PLC0415 - what runs here is the copy's tests

        with contextlib.suppress(ImportError):
            from hypothesis import HealthCheck, settings  # noqa: PLC0415 - if there is one

            # The same examples every time, however slow: otherwise chance would kill mutants.
            checks = list(HealthCheck)
            settings.register_profile(
                "mutate", derandomize=True, deadline=None, suppress_health_check=checks
            )
            settings.load_profile("mutate")
        options = ["-x", "-q", "--assert=plain", "--tb=no", "-p", "no:cacheprovider"]
        return int(pytest.main([*options, *tests], plugins=plugins))

    def _recorded(self, test: str, notes: Path) -> int:
        """Run a test file and note what it enters."""
        calls = _Calls()
        calls.pytest_runtest_logstart()
        code = self._pytest([test], calls)
        sys.settrace(None)
        places = [(Path(c.co_filename).resolve(), c.co_qualname) for c in calls.entered.values()]
        ours = [(path, name) for path, name in places if path.is_relative_to(self.root)]
        names = {f"{path.relative_to(self.root)}::{name}" for path, name in ours}
        notes.write_text(json.dumps(sorted(names)))
        return code


class _Calls:
    """Sees which functions are called; a trace function, and a plugin of pytest.

    It looks from the start of every test on, until nothing new seems to come.
    """

    def __init__(self) -> None:
        self.entered: dict[int, CodeType] = {}
        self._stale = 0
        """Calls since the last function that was new."""

    def pytest_runtest_logstart(self) -> None:
        self._stale = 0
        threading.settrace(self._note)
        sys.settrace(self._note)

    def _note(self, frame: FrameType, _event: str, _argument: object) -> None:
        code = frame.f_code
        if id(code) not in self.entered:
            self.entered[id(code)], self._stale = code, 0
        self._stale += 1
        if self._stale > _PATIENCE:
            threading.settrace(None)
            sys.settrace(None)


def _busy_s() -> float:
    """Processor time of all children so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def preload() -> None:
    """Import what takes long to import and is not of the tree, once for all runs."""
    for name in ("pytest", "numpy", "hypothesis", "onnxruntime", "onnx"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
