"""Jobs run in a real child process; whatever befalls it is one job's failure."""

from __future__ import annotations

import builtins
import functools
import logging
import operator
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.facts import facts, tells

from offramp.baselines.thresholds import tune
from offramp.engine.common import job_runner
from offramp.engine.common.errors import EngineError
from offramp.engine.common.job_runner import JobError, JobRunner
from offramp.engine.common.job_worker import NICENESS, READY, read_message
from offramp.engine.control.controller import Job

PATIENCE_S = 60.0
"""For what should be there at once; a test that waits that long has failed."""
FOREVER_S = 3600.0
"""For a job that is not waited for."""

posix = pytest.mark.skipif(os.name != "posix", reason="signals and priorities are those of POSIX")


@pytest.fixture
def runner() -> Iterator[JobRunner]:
    with JobRunner(limit_s=PATIENCE_S) as made:
        yield made


def job(function: Callable[..., Any], *arguments: Any, purpose: str = "test") -> Job:
    return Job(number=1, purpose=purpose, function=function, arguments=arguments)


def result(runner: JobRunner, function: Callable[..., Any], *arguments: Any) -> Any:
    return runner.submit(job(function, *arguments)).result(PATIENCE_S)


def failure(future: Future[Any]) -> JobError:
    error = future.exception(PATIENCE_S)
    assert isinstance(error, JobError)
    return error


def until_its_turn(future: Future[Any]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not (future.running() or future.done()):
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def is_gone(pid: int) -> bool:
    """Whether a child of ours has ended, and was waited for."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def environment() -> dict[str, str]:
    """For a process that shall find what we find."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}


def run_script(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    """Run it in ``folder``, and wait until nobody holds its output any more."""
    (folder / "elsewhere").mkdir()
    script = folder / "elsewhere" / "script.py"
    script.write_text(source)
    return subprocess.run(
        [sys.executable, script],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_a_tuning_gives_what_it_gives_here(runner: JobRunner) -> None:
    rng = np.random.default_rng(7)
    confidence = rng.random((4, 512), dtype=np.float32)
    agrees = rng.random((4, 512)) < confidence
    latency_ms = np.linspace(1.0, 5.0, 5)
    here = tune(confidence, agrees, latency_ms, 0.05)
    there = result(runner, tune, confidence, agrees, latency_ms, 0.05)
    assert here.exit_shares[:-1].any()
    np.testing.assert_array_equal(there.thresholds, here.thresholds)
    np.testing.assert_array_equal(there.exit_shares, here.exit_shares)
    assert (there.savings, there.disagreement) == (here.savings, here.disagreement)


def test_jobs_run_in_one_child_of_ours(runner: JobRunner) -> None:
    assert len({result(runner, os.getpid) for _ in range(3)}) == 1
    assert result(runner, os.getppid) == os.getpid()


def test_jobs_are_through_in_the_order_of_submission(runner: JobRunner) -> None:
    seen: list[int] = []
    for n in range(200):
        runner.submit(job(operator.mul, n, 10)).add_done_callback(lambda f: seen.append(f.result()))
    result(runner, os.getpid)  # callbacks are called by the thread that runs this one
    assert seen == [10 * n for n in range(200)]


def test_every_thread_is_given_its_own_results(runner: JobRunner) -> None:
    found: dict[int, list[int]] = {}

    def submit(first: int) -> None:
        futures = [runner.submit(job(operator.add, first, n)) for n in range(20)]
        found[first] = [future.result(PATIENCE_S) for future in futures]

    threads = [threading.Thread(target=submit, args=(100 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {first: list(range(first, first + 20)) for first in (0, 100, 200, 300)}


def test_arguments_are_those_at_submission(runner: JobRunner) -> None:
    """A controller goes on observing into its arrays."""
    runner.submit(job(time.sleep, 0.1))
    counts = np.arange(3)
    waiting = runner.submit(job(operator.pos, counts))
    counts[:] = -1
    assert waiting.result(PATIENCE_S).tolist() == [0, 1, 2]


def test_messages_bigger_than_a_pipe_pass_both_ways(runner: JobRunner) -> None:
    big = np.arange(1_000_000)
    np.testing.assert_array_equal(result(runner, operator.neg, big), -big)


def test_what_a_job_prints_is_not_taken_for_its_answer(
    runner: JobRunner, capfd: pytest.CaptureFixture[str]
) -> None:
    assert result(runner, builtins.print, "by print") is None
    assert result(runner, os.write, 1, b"by descriptor\n") == 14
    assert result(runner, os.read, 0, 1) == b""  # it cannot eat our messages either
    runner.close()
    assert capfd.readouterr() == ("", "by print\nby descriptor\n")


def test_a_job_that_raises_fails_alone(runner: JobRunner) -> None:
    pid = result(runner, os.getpid)
    error = failure(runner.submit(job(operator.truediv, 1, 0, purpose="dividing")))
    assert str(error) == "dividing: ZeroDivisionError: division by zero"
    assert error.__notes__[0].startswith("Traceback (most recent call last)")
    assert isinstance(error, EngineError)
    assert result(runner, os.getpid) == pid


@pytest.mark.parametrize(
    ("function", "arguments", "said"),
    [
        (sys.exit, (3,), "SystemExit: 3"),
        (signal.default_int_handler, (2, None), "KeyboardInterrupt"),
        (threading.Lock, (), "cannot pickle"),
    ],
)
def test_whatever_goes_wrong_in_a_job_is_its_failure(
    runner: JobRunner, function: Callable[..., Any], arguments: tuple[Any, ...], said: str
) -> None:
    pid = result(runner, os.getpid)
    assert said in str(failure(runner.submit(job(function, *arguments))))
    assert result(runner, os.getpid) == pid


@posix
@pytest.mark.parametrize(
    ("function", "argument", "said"),
    [
        (os._exit, 7, "its process ended with exit status 7"),
        (signal.raise_signal, signal.SIGTERM, "its process was ended by SIGTERM"),
        (signal.raise_signal, getattr(signal, "SIGKILL", 9), "its process was ended by SIGKILL"),
    ],
)
def test_a_job_that_ends_its_process_fails_and_the_next_has_another(
    runner: JobRunner, function: Callable[..., Any], argument: int, said: str
) -> None:
    pid = result(runner, os.getpid)
    fatal = runner.submit(job(function, argument, purpose="dying"))
    behind = runner.submit(job(os.getpid))
    assert str(failure(fatal)) == f"dying: {said}"
    assert behind.result(PATIENCE_S) != pid
    assert is_gone(pid)


@posix
def test_a_child_that_died_idle_costs_no_job(runner: JobRunner) -> None:
    pid = result(runner, os.getpid)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert result(runner, os.getpid) != pid


@posix
@pytest.mark.parametrize(
    ("function", "argument"),
    [(time.sleep, FOREVER_S), (signal.raise_signal, getattr(signal, "SIGSTOP", 19))],
)
def test_a_job_that_hangs_fails_at_its_limit(function: Callable[..., Any], argument: float) -> None:
    with JobRunner(limit_s=2.0) as runner:
        pid = result(runner, os.getpid)
        hanging = runner.submit(job(function, argument, purpose="hanging"))
        behind = runner.submit(job(os.getpid))
        said = "hanging: took longer than 2 s, so its process was killed"
        assert str(failure(hanging)) == said
        assert behind.result(PATIENCE_S) != pid
        assert is_gone(pid)


@posix
@pytest.mark.parametrize(
    ("function", "argument"),
    [(time.sleep, FOREVER_S), (signal.raise_signal, getattr(signal, "SIGSTOP", 19))],
)
def test_closing_ends_what_runs_and_fails_what_waits(
    function: Callable[..., Any], argument: float
) -> None:
    runner = JobRunner()
    pid = result(runner, os.getpid)
    running = runner.submit(job(function, argument))
    waiting = [runner.submit(job(os.getpid)) for _ in range(3)]
    until_its_turn(running)
    runner.close()
    for future in (running, *waiting):
        tells(str(failure(future)), "test", "closed", "make another")
    assert is_gone(pid)


def test_closing_amid_the_start_leaves_nothing() -> None:
    for _ in range(5):
        runner = JobRunner()
        first = runner.submit(job(os.getpid))
        until_its_turn(first)
        runner.close()
        assert first.done()
        assert first.exception() or first.result() != os.getpid()
        assert not runner._thread.is_alive()
        assert runner._child is None


def test_closed_is_closed(runner: JobRunner) -> None:
    assert result(runner, operator.add, 1, 2) == 3
    runner.close()
    runner.close()
    with pytest.raises(JobError, match=r"closed; make another"):
        runner.submit(job(os.getpid))
    with pytest.raises(JobError, match=r"closed; make another"):
        runner.start()


def test_closing_what_never_ran_starts_nothing() -> None:
    runner = JobRunner()
    runner.close()
    assert not runner._thread.is_alive()
    assert runner._child is None


def test_a_callback_may_close(runner: JobRunner) -> None:
    closed = threading.Event()

    def close(_: Future[Any]) -> None:
        runner.close()
        closed.set()

    runner.submit(job(time.sleep, 0.05)).add_done_callback(close)
    waiting = runner.submit(job(os.getpid))
    assert closed.wait(PATIENCE_S)
    assert "closed" in str(failure(waiting))


def test_a_cancelled_job_never_runs(runner: JobRunner, tmp_path: Path) -> None:
    running = runner.submit(job(time.sleep, 0.2))
    waiting = runner.submit(job(os.mkdir, str(tmp_path / "made")))
    assert waiting.cancel()
    behind = runner.submit(job(os.getpid))
    assert running.result(PATIENCE_S) is None
    assert behind.result(PATIENCE_S) != os.getpid()
    assert not (tmp_path / "made").exists()


def test_the_child_can_be_started_ahead(runner: JobRunner) -> None:
    assert runner.start().result(PATIENCE_S) is None
    assert runner._child is not None
    assert result(runner, os.getpid) == runner._child._process.pid


@posix
def test_the_child_stands_back(runner: JobRunner) -> None:
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    assert result(runner, os.getpriority, os.PRIO_PROCESS, 0) == min(ours + NICENESS, 19)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        assert result(runner, os.getenv, name) == "1"
    assert result(runner, signal.getsignal, signal.SIGINT) is signal.SIG_IGN
    assert result(runner, os.getpgrp) == os.getpgrp()


def in_a_module_that_was_run() -> int:
    return 1


in_a_module_that_was_run.__module__ = "__main__"


@pytest.mark.parametrize(
    "function",
    [
        lambda: 1,
        functools.partial(operator.add, 1),
        [].append,
        Path("x").exists,
        in_a_module_that_was_run,
    ],
    ids=["lambda", "partial", "builtin method", "method", "main"],
)
def test_functions_that_have_no_name_elsewhere_are_refused(
    runner: JobRunner, function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "in_a_module_that_was_run", in_a_module_that_was_run, raising=False)
    with pytest.raises(TypeError, match=facts("tuning", "function at the top")):
        runner.submit(job(function, purpose="tuning"))
    assert runner._child is None


def test_arguments_that_cannot_be_sent_are_refused(runner: JobRunner) -> None:
    with pytest.raises(TypeError, match=r"tuning: the arguments cannot be sent .*lock"):
        runner.submit(job(operator.pos, threading.Lock(), purpose="tuning"))


@pytest.mark.parametrize("limit_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_limit_is_a_time(limit_s: float) -> None:
    with pytest.raises(ValueError, match=r"limit_s must be"):
        JobRunner(limit_s=limit_s)


@posix
@pytest.mark.parametrize(
    ("interpreter", "said"),
    [
        ("/nonexistent/python", "No such file"),
        ("/bin/false", "exit status 1"),
        ("/bin/echo", "something else writes"),
        ("", "unknown"),
    ],
)
def test_without_a_child_jobs_run_in_a_thread_and_one_line_says_so(
    runner: JobRunner,
    interpreter: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with monkeypatch.context() as patched, caplog.at_level(logging.DEBUG):
        patched.setattr(sys, "executable", interpreter)
        assert result(runner, os.getpid) == os.getpid()
        error = failure(runner.submit(job(operator.truediv, 1, 0, purpose="dividing")))
        assert str(error) == "dividing: ZeroDivisionError: division by zero"
        assert result(runner, operator.add, 1, 2) == 3
    (line,) = caplog.records
    assert line.levelno == logging.WARNING
    assert "they run in a thread" in line.getMessage()
    assert said in line.getMessage()
    assert result(runner, os.getppid) == os.getpid()  # it is tried again


def test_closing_does_not_wait_for_a_job_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")
    monkeypatch.setattr(job_runner, "_STOP_S", 0.01)
    runner = JobRunner()
    running, waiting = runner.submit(job(time.sleep, 3.0)), runner.submit(job(os.getpid))
    until_its_turn(running)
    runner.close()
    assert "closed" in str(failure(running))
    assert "closed" in str(failure(waiting))
    runner._thread.join(PATIENCE_S)  # it does not stumble over the futures
    assert not runner._thread.is_alive()


@posix
def test_a_worker_without_standard_error_is_a_worker() -> None:
    started = subprocess.Popen(
        ["/bin/sh", "-c", f'exec "$0" -P -m {job_runner._WORKER} 2>&-', sys.executable],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(),
    )
    with started as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        assert read_message(worker.stdout) == READY
        worker.stdin.close()
        assert worker.wait(PATIENCE_S) == 0


def test_a_script_without_a_guard_runs_once(tmp_path: Path) -> None:
    """And what lies in the working directory is not imported by the child alone."""
    (tmp_path / "pickle.py").write_text("raise SystemExit('wrong pickle')\n")
    done = run_script(
        tmp_path,
        """
import os
from offramp.engine.control.controller import Job
from offramp.engine.common.job_runner import JobRunner

print("once")
with JobRunner() as runner:
    job = Job(number=1, purpose="test", function=os.getppid, arguments=())
    assert runner.submit(job).result(60) == os.getpid()
""",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "once\n", "")


@posix
def test_an_orphan_ends_itself_amid_a_job(tmp_path: Path) -> None:
    """The child holds the script's standard error, which ends when both are gone."""
    done = run_script(
        tmp_path,
        """
import os, signal, time
from offramp.engine.control.controller import Job
from offramp.engine.common.job_runner import JobRunner

runner = JobRunner()
runner.start().result(60)
job = Job(number=1, purpose="test", function=time.sleep, arguments=(3600.0,))
running = runner.submit(job)
while not running.running():
    time.sleep(0.001)
os.kill(os.getpid(), signal.SIGKILL)
""",
    )
    assert (done.returncode, done.stderr) == (-signal.SIGKILL, "")
