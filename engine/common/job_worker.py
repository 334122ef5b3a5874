"""The process that computes jobs for :mod:`.job_runner`: ``python -m .common.job_worker``.

Reads messages from standard input and writes one answer each to standard output, in order, until
its input ends. A message is its length (8 bytes, little-endian) and a pickle:

* asked: ``(function, arguments)``;
* answered: ``(True, result, "")`` or ``(False, "ValueError: what", traceback)``;
* before all answers, :data:`READY`.

Pickles are fine here: both ends are the same program of the same user, the pipes have no name that
anybody else could open, and nothing that came over the network is ever unpickled; who could write
into these pipes could as well write into the memory of either process. No pickle is ever a file.

Imports only the standard library by itself: what a job needs is imported when its function is
unpickled, at the lower priority that the process has by then.
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
"""Sent once, as soon as jobs are taken."""
NICENESS: Final = 10
"""Added to the priority value of the parent: streams that run batches go first."""
_LENGTH: Final = struct.Struct("<Q")
_MOST_BYTES: Final = 1 << 40
"""No message is that long; eight letters that somebody printed are a longer one."""


def write_message(stream: IO[bytes], content: bytes) -> None:
    """Send a message whole; OSError if nobody reads any more."""
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
    """Compute what a message asks for; whatever goes wrong with it is the answer."""
    try:
        function, arguments = pickle.loads(message)  # noqa: S301  (from the parent: see above)
        result = function(*arguments)
        return pickle.dumps((True, result, ""), pickle.HIGHEST_PROTOCOL)
    except BaseException as error:  # SystemExit too: it ends the job, not the process
        return pickle.dumps((False, describe(error), traceback.format_exc()))


def describe(error: BaseException) -> str:
    """Give an error in a line: ``ValueError: what``."""
    return "".join(traceback.format_exception_only(error)).strip()


def main() -> NoReturn:
    """Compute jobs until the input ends."""
    step_back()
    requests, answers = _take_streams()
    messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(requests, messages), daemon=True).start()
    try:
        write_message(answers, READY)
        while True:
            write_message(answers, answer(messages.get()))
    except OSError:  # the parent is gone, or closed its end
        os._exit(0)


def step_back() -> None:
    """Leave the processor to the parent, and its interrupts too."""
    with contextlib.suppress(OSError, AttributeError):  # there is no os.nice on Windows
        os.nice(NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole foreground group


def _take_streams() -> tuple[IO[bytes], IO[bytes]]:
    """Keep the pipes for messages: what a job prints goes to standard error."""
    nothing = os.open(os.devnull, os.O_RDWR)
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return requests, answers


def _listen(requests: IO[bytes], messages: queue.SimpleQueue[Any]) -> None:
    """Pass messages on; end the process with its input, even amid a job.

    A thread of its own, because an orphan in a long job would not see for itself that nobody
    waits for the result.
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
