from __future__ import annotations

import numpy as np
import pytest

from offramp.bundle import Answer
from offramp.calibration.choose.exit_records import ExitRecords
from offramp.compiler.samples.checks import warn_of_answers

ANSWER = Answer(output="y", classes=2, form="logits")


def warned(
    caplog: pytest.LogCaptureFixture, given: list[int], labels: list[int] | None = None
) -> str:
    count = len(given)
    warn_of_answers(
        ANSWER,
        ExitRecords(
            confidence=np.zeros((0, count), np.float32),
            prediction=np.zeros((0, count), np.int32),
            final_prediction=np.array(given, np.int32),
            final_confidence=np.zeros(count, np.float32),
            labels=None if labels is None else np.array(labels),
        ),
    )
    return caplog.text


def test_one_class_throughout_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    text = warned(caplog, [1] * 50, [0, 1] * 25)
    assert "all 50 samples alike (1)" in text
    assert "preprocessing" in text


def test_labels_that_are_right_by_chance_alone_are_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    text = warned(caplog, [0, 0, 1, 1] * 25, [0, 1, 0, 1] * 25)
    assert "right in 50.0 % of the samples, and a guess" in text
    assert "would be right in 50.0 %" in text


@pytest.mark.parametrize("labels", [None, [0, 1] * 50, [0, 1, 1, 1] * 25])
def test_answers_that_fit_the_labels_are_fine(
    caplog: pytest.LogCaptureFixture, labels: list[int] | None
) -> None:
    assert warned(caplog, [0, 1] * 50, labels) == ""
