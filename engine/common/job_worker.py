"""The process that computes jobs for :mod:`.job_runner`: ``python -m .common.job_worker``.

It reads messages from standard input and writes one answer each to standard output, in order, until
its input ends. A message is its length (8 bytes, little-endian) and a pickle:

* request: ``(function, arguments)``;
* answer: ``(True, result, "")`` or ``(False, "ValueError: what", traceback)``;
* before all answers, :data:`READY`.

Pickles are safe here: both ends are the same program of the same user, no one else can open the
unnamed pipes, and no data from the network is unpickled. A process that could write into these
pipes could also write into the memory of either process. Pickles are never files.

The module itself imports only the standard library: a job's modules are imported when its function
is unpickled, after the process has lowered its priority.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import struct
import sys
import threading
import traceback
from typing import IO, Any, Final, NoReturn

READY: Final = b"ready"
"""Message that is sent once, as soon as jobs are accepted."""
NICENESS: Final = 10
"""Number added to the parent's nice value, because streams that run batches have priority."""
_LENGTH: Final = struct.Struct("<Q")
_MOST_BYTES: Final = 1 << 40
"""Upper bound on a message's length: no message is longer, and eight printed characters that are
read as a length exceed it."""


def write_message(stream: IO[bytes], content: bytes) -> None:
    """Send a whole message; OSError if the reader is gone."""
    stream.write(_LENGTH.pack(len(content)))
    stream.write(content)
    stream.flush()


def read_message(stream: IO[bytes]) -> bytes:
    """Wait for a message; EOFError if the stream ends, ValueError if it holds something else."""
    head = _read(stream, _LENGTH.size)
    (length,) = _LENGTH.unpack(head)
    if length > _MOST_BYTES:
        raise ValueError(f"expected a message, found {head!r}")
    return _read(stream, length)


def answer(message: bytes) -> bytes:
    """Compute a requested job and return the answer; an error is an answer, too."""
    try:
        function, arguments = pickle.loads(message)  # noqa: S301  (from the parent: see above)
        result = function(*arguments)
        return pickle.dumps((True, result, ""), pickle.HIGHEST_PROTOCOL)
    except BaseException as error:  # SystemExit too: it ends the job, not the process
        return pickle.dumps((False, describe(error), traceback.format_exc()))


def describe(error: BaseException) -> str:
    """Describe an error in one line: ``ValueError: what``."""
    return "".join(traceback.format_exception_only(error)).strip()


def main() -> NoReturn:
    """Compute jobs until the input ends."""
    lower_priority()
    requests, answers = _take_streams()
    messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(requests, messages), daemon=True).start()
    try:
        write_message(answers, READY)
        while True:
            write_message(answers, answer(messages.get()))
    except OSError:  # the parent is gone, or closed its end
        os._exit(0)


def lower_priority() -> None:
    """Lower this process's priority, and ignore interrupts, which the parent handles."""
    with contextlib.suppress(OSError, AttributeError):  # there is no os.nice on Windows
        os.nice(NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole foreground group


def _take_streams() -> tuple[IO[bytes], IO[bytes]]:
    """Reserve the pipes for messages: output that a job prints goes to standard error."""
    nothing = os.open(os.devnull, os.O_RDWR)
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return requests, answers


def _listen(requests: IO[bytes], messages: queue.SimpleQueue[Any]) -> None:
    """Queue messages; end the process when its input ends, even during a job.

    This needs its own thread: an orphan in a long job would not notice that its parent is gone.
    """
    while True:
        try:
            messages.put(read_message(requests))
        except (OSError, EOFError):
            os._exit(0)


def _read(stream: IO[bytes], size: int) -> bytes:
    content = stream.read(size)
    if len(content) < size:
        raise EOFError(f"the stream ended {size - len(content)} bytes early")
    return content


if __name__ == "__main__":
    sys.exit(main())
