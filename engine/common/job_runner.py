"""Runs the jobs of controllers in a separate process, so that no batch waits for one.

A tuning in a thread of the server takes the interpreter's lock repeatedly and delays every stream
that returns from a kernel: by 1 ms and more at the 99th percentile, against 0.2 ms with a child
process. So each runner has one child process, at lower priority, that computes one job after the
other.

Rejected: :mod:`multiprocessing`, whose spawn and forkserver import the user's ``__main__`` script
again (without a guard that starts a second server), and whose fork copies the locks of threads and
of ONNX Runtime in any state; a child for each job, which needs 0.2 s of imports each time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any, Final, Self

from offramp.engine.common.errors import EngineError
from offramp.engine.common.job_worker import READY, answer, describe, read_message, write_message
from offramp.engine.control.controller import Job

_log = logging.getLogger(__name__)

LIMIT_S: Final = 60.0
"""Default time limit of a job: about a hundred times the time of a tuning."""
_START_S: Final = 60.0
"""Time limit of a child's start, sufficient on a machine busy with work of higher priority."""
_STOP_S: Final = 5.0
"""Time limit of operations that usually take milliseconds."""
_WORKER: Final = "offramp.engine.common.job_worker"
_THREADS: Final = (
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
"""Environment variables set to 1: a job must not use the cores of the streams."""


class JobError(EngineError):
    """A job has no result: its function raised, it took too long, or its process ended."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Task:
    """A queued job."""

    purpose: str
    message: bytes | None
    """A message of :mod:`.job_worker`; ``None`` only starts the child."""
    future: Future[Any] = field(default_factory=Future)

    def fail(self, error: JobError) -> None:
        with contextlib.suppress(InvalidStateError):  # cancelled, or failed by close()
            self.future.set_exception(error)


class JobRunner:
    """Computes jobs in one child process, in order of submission.

    The child starts with the first job, or with :meth:`start`. If it dies, or a job runs longer
    than ``limit_s``, that job fails and the next one gets a new child. If no child can be started,
    jobs run in a thread of this process, without a time limit, and a warning is logged.

    Any thread may call any method; all but :meth:`close` raise :class:`JobError` after it is
    closed.
    """

    def __init__(self, *, limit_s: float = LIMIT_S) -> None:
        if not 0 < limit_s <= threading.TIMEOUT_MAX:
            raise ValueError(f"limit_s must be seconds above 0, got {limit_s}")
        self._limit_s = limit_s
        self._queue: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        """Lock of the next three attributes; it is never held while waiting."""
        self._tasks: dict[Future[Any], _Task] = {}
        """Unfinished tasks, by the future of their result."""
        self._child: _Child | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="jobs", daemon=True)
        self._alone = False
        """``True`` if the last child could not be started; used by the thread only."""

    def start(self) -> Future[Any]:
        """Start the child now, for the first job; the future is done when the child takes jobs."""
        return self._put(_Task(purpose="starting", message=None))

    def submit(self, job: Job) -> Future[Any]:
        """Compute a job after the jobs before it.

        Its arguments are copied before this returns. The future has the function's result, or
        raises :class:`JobError` with the traceback in its notes; its callbacks run in the runner's
        thread. A job can be cancelled until it starts. TypeError if the function is not one of an
        importable module, or the arguments cannot be pickled.
        """
        _check_function(job)
        try:
            message = pickle.dumps((job.function, job.arguments), pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # any error that a __reduce__ raises
            raise TypeError(
                f"{job.purpose}: the arguments cannot be sent to another process "
                f"({describe(error)}); pass arrays, dataclasses and plain values"
            ) from error
        return self._put(_Task(purpose=job.purpose, message=message))

    def close(self) -> None:
        """Kill the child; unfinished jobs fail with :class:`JobError`.

        Blocks for milliseconds. A job that runs in a thread of this process is not stopped.
        """
        with self._lock:
            self._closed = True
            child, running = self._child, self._thread.ident is not None
        if child is not None:
            child.kill()
        self._queue.put(None)
        if running and threading.current_thread() is not self._thread:
            self._thread.join(_STOP_S)
        with self._lock:
            left = list(self._tasks.values())
            self._tasks.clear()
        for task in left:
            task.fail(_closed_error(task))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _put(self, task: _Task) -> Future[Any]:
        with self._lock:
            if self._closed:
                raise _closed_error(task)
            self._tasks[task.future] = task
            self._queue.put(task)
            if self._thread.ident is None:
                self._thread.start()
        return task.future

    def _work(self) -> None:
        """Run tasks until closed; the only thread that uses the child's pipes."""
        while (task := self._queue.get()) is not None and not self._closed:
            if task.future.set_running_or_notify_cancel():
                self._settle(task)
            with self._lock:
                self._tasks.pop(task.future, None)
        self._replace_child(None)

    def _settle(self, task: _Task) -> None:
        try:
            result = self._compute(task)
        except JobError as error:
            task.fail(_closed_error(task) if self._closed else error)
        except Exception as error:  # no memory, no thread: fails this job only
            self._replace_child(None)
            task.fail(JobError(f"{task.purpose}: {describe(error)}"))
        else:
            with contextlib.suppress(InvalidStateError):
                task.future.set_result(result)

    def _compute(self, task: _Task) -> Any:
        child = self._usable_child()
        if task.message is None:
            return None
        if child is None:
            reply = answer(task.message)
        else:
            try:
                reply = child.ask(task.message, self._limit_s)
            except _ChildError as error:
                raise JobError(f"{task.purpose}: {error}") from error
        done, result, trace = pickle.loads(reply)  # noqa: S301  (from our child: see job_worker)
        if done:
            return result
        failure = JobError(f"{task.purpose}: {result}")
        failure.add_note(trace)
        raise failure

    def _usable_child(self) -> _Child | None:
        """Return the child, started if needed; ``None`` if none can be started."""
        if self._child is not None and self._child.usable:
            return self._child
        self._replace_child(None)
        try:
            self._replace_child(_Child())
            assert self._child is not None
            self._child.greet()
        except (OSError, _ChildError) as error:
            self._replace_child(None)
            if self._closed:
                raise JobError("closed during the start") from error
            if not self._alone:
                instead = "they run in a thread, and may delay batches"
                _log.warning("no process can be started for jobs (%s); %s", error, instead)
            self._alone = True
        else:
            self._alone = False
        return self._child

    def _replace_child(self, child: _Child | None) -> None:
        with self._lock:
            former, self._child = self._child, child
            closed = self._closed
        if former is not None:
            former.end()
        if child is not None and closed:  # close() did not see it
            child.kill()


class _ChildError(Exception):
    """The child did not answer and is unusable."""


class _Child:
    """A process that runs :mod:`.job_worker`; OSError if the system cannot start it.

    Only one thread sends messages; any thread may kill the process.
    """

    def __init__(self) -> None:
        if not sys.executable:
            raise OSError("the path of the Python interpreter is unknown")
        self._broken = False
        self._process = subprocess.Popen(  # noqa: S603  (our own module and arguments)
            # -P: modules of the working directory are not imported unless sys.path has it here,
            # too.
            [sys.executable, "-P", "-m", _WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment_of_child(),
            # On other systems the child lowers its own priority. It stays in our session:
            # schedulers that share cores among sessions would give another session half of a core.
            creationflags=getattr(subprocess, "BELOW_NORMAL_PRIORITY_CLASS", 0),
        )

    @property
    def usable(self) -> bool:
        """``True`` if the child can receive messages, as far as is known."""
        return not self._broken and self._process.poll() is None

    def greet(self) -> None:
        """Wait until the child takes jobs.

        _ChildError if it ends, is too slow, or is another program.
        """
        said = self.ask(None, _START_S)
        if said != READY:
            raise _ChildError(f"{sys.executable} said {said!r:.40}, expected {READY!r}")

    def kill(self) -> None:
        """Kill the child immediately; it has nothing to clean up."""
        with contextlib.suppress(OSError):
            self._process.kill()

    def end(self) -> None:
        """Kill the child, and release its pipes."""
        self.kill()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):  # unsent data is lost
            self._process.stdin.close()
        self._process.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)

    def ask(self, message: bytes | None, limit_s: float) -> bytes:
        """Send a message and return the answer; ``None`` waits for the child's first message.

        _ChildError if it took longer than ``limit_s`` and was killed, or if it ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        expired = threading.Event()
        timer = threading.Timer(limit_s, self._expire, (expired,))
        timer.daemon = True
        timer.start()
        try:
            if message is not None:
                write_message(self._process.stdin, message)
            return read_message(self._process.stdout)
        except (OSError, EOFError) as error:
            self._broken = True
            late = f"took longer than {limit_s:g} s, so its process was killed"
            raise _ChildError(late if expired.is_set() else self._fate()) from error
        except ValueError as error:
            self._broken = True
            raise _ChildError(f"something else writes to its output: {error}") from error
        finally:
            timer.cancel()
            timer.join()  # it may be about to kill the child
            self._broken = self._broken or expired.is_set()

    def _expire(self, expired: threading.Event) -> None:
        expired.set()
        self.kill()

    def _fate(self) -> str:
        try:
            status = self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            return "its process closed its pipes"
        if status < 0:
            return f"its process was ended by {_signal_name(-status)}"
        return f"its process ended with exit status {status}"


def environment_of_child() -> dict[str, str]:
    """Return this process's environment, with the same module path and one thread for numpy."""
    found = os.pathsep.join(os.path.abspath(place) for place in sys.path)  # noqa: PTH100 ("" too)
    return {**os.environ, **dict.fromkeys(_THREADS, "1"), "PYTHONPATH": found}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _check_function(job: Job) -> None:
    """Raise TypeError for a function that another process cannot find by its name."""
    module = getattr(job.function, "__module__", None)
    name = getattr(job.function, "__qualname__", None)
    found = getattr(sys.modules.get(str(module)), str(name), None)
    if found is not job.function or module == "__main__":
        raise TypeError(
            f"{job.purpose}: {job.function!r} is not a function at the top of an importable "
            "module; move it there, and pass the variables that it encloses as arguments"
        )


def _closed_error(task: _Task) -> JobError:
    return JobError(f"{task.purpose}: the job runner was closed; make another")
