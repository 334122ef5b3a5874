"""TensorRT's messages reach logging, and its errors reach their collectors."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from tests.unit.tensorrt.fake_tensorrt import FakeTensorRT

from offramp.engine.tensorrt import tensorrt_messages
from offramp.engine.tensorrt.tensorrt_messages import errors_of_tensorrt, receive


def test_there_is_one_logger(fake: FakeTensorRT) -> None:
    logger: Any = tensorrt_messages.logger()
    assert tensorrt_messages.logger() is logger
    assert isinstance(logger, fake.module.ILogger)
    with errors_of_tensorrt() as errors:
        logger.log(fake.module.ILogger.Severity.INTERNAL_ERROR, "no kernel\n")
        logger.log(fake.module.ILogger.Severity.WARNING, "slow")
    assert errors == ["no kernel"]


@pytest.mark.parametrize(
    ("severity", "level"),
    [
        ("INTERNAL_ERROR", logging.ERROR),
        ("ERROR", logging.ERROR),
        ("WARNING", logging.WARNING),
        ("INFO", logging.DEBUG),
        ("VERBOSE", logging.DEBUG),
        ("SOMETHING_NEW", logging.WARNING),
    ],
)
def test_levels(severity: str, level: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        receive(severity, "text")
    assert [(r.levelno, r.message) for r in caplog.records] == [(level, "TensorRT: text")]


def test_collected_errors_are_not_logged_as_well(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), errors_of_tensorrt():
        receive("ERROR", "text")
    assert caplog.records == []


def test_collectors_within_collectors() -> None:
    with errors_of_tensorrt() as outer:
        receive("ERROR", "a")
        with errors_of_tensorrt() as inner:
            receive("ERROR", "b")
        receive("ERROR", "c")
    receive("ERROR", "d")
    assert (outer, inner) == (["a", "b", "c"], ["b"])


def test_the_first_errors_are_kept() -> None:
    with errors_of_tensorrt() as errors:
        for number in range(20):
            receive("ERROR", str(number))
    assert errors == [str(number) for number in range(8)]
