from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator

import pytest
from tests.facts import tells

from offramp.engine.common.line_limit import MOST_LINES, QueuedHandler

PIPE_BYTES = 4096
LINE = "x" * 99


@pytest.fixture
def pipe() -> Iterator[tuple[int, logging.Logger]]:
    """A logger that writes to a pipe with room for some forty lines, and the pipe's other end."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    logger = logging.Logger("of_a_test")
    with os.fdopen(writing, "w") as stream:
        logger.addHandler(QueuedHandler(stream))
        yield reading, logger
        os.close(reading)


def test_an_unread_log_blocks_no_thread(pipe: tuple[int, logging.Logger]) -> None:
    reading, logger = pipe
    extra = 500
    for number in range(MOST_LINES + extra):
        logger.info("%s %d", LINE, number)  # returns at once: the test would not end otherwise
    (handler,) = logger.handlers
    assert isinstance(handler, QueuedHandler)
    found = b""
    while f"{LINE} {MOST_LINES - 1}\n".encode() not in found:
        found += os.read(reading, 2**20)
    logger.info("after")
    while b"after\n" not in found:
        found += os.read(reading, 2**20)
    *lines, told, last = found.decode().splitlines()
    assert last == "after"
    dropped = int(told.removeprefix("(").split()[0])
    tells(told, f"{dropped} lines", "dropped")
    assert lines == [f"{LINE} {number}" for number in range(len(lines))]
    assert len(lines) + dropped == MOST_LINES + extra
    assert dropped > 0


def test_all_that_was_logged_is_written_once_it_is_flushed(
    pipe: tuple[int, logging.Logger],
) -> None:
    reading, logger = pipe
    for number in range(20):
        logger.info("%d", number)
    logger.handlers[0].flush()
    assert os.read(reading, 2**16).decode().split() == [str(number) for number in range(20)]


def test_a_pipe_that_does_not_block_loses_no_line(pipe: tuple[int, logging.Logger]) -> None:
    reading, logger = pipe
    (handler,) = logger.handlers
    assert isinstance(handler, QueuedHandler)
    os.set_blocking(handler._stream.fileno(), False)
    lines = [f"{LINE} {number}" for number in range(500)]
    for line in lines:
        logger.info("%s", line)
    found = b""
    while not found.endswith(f"{lines[-1]}\n".encode()):
        found += os.read(reading, PIPE_BYTES)
    assert found.decode().splitlines() == lines


def test_a_reader_that_has_gone_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        handler = QueuedHandler(stream)
        handler.emit(logging.makeLogRecord({"msg": "lost"}))
        handler.flush()
