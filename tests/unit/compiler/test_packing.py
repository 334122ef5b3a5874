"""What the certify split says of an exit goes into the manifest."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.bundle.examples import HEAD

from offramp.bundle import Exit
from offramp.calibration.records import ExitRecords
from offramp.compiler.packing import judged

EXIT = Exit(
    index=1,
    file="exits/01.onnx",
    after_segment=0,
    inputs=("t",),
    output="answer",
    confidence="confidence",
    head=HEAD,
    agreement=0.0,
)


def records(labels: np.ndarray | None) -> ExitRecords:
    """Exit 1 agrees with the source model on 3 of 4 samples, and is right on 1."""
    return ExitRecords(
        confidence=np.ones((2, 4), np.float32),
        prediction=np.array([[9, 9, 9, 9], [0, 1, 2, 9]], np.int32),
        final_prediction=np.array([0, 1, 2, 3], np.int32),
        final_confidence=np.ones(4, np.float32),
        labels=labels,
    )


def test_agreement_and_accuracy_are_those_of_its_own_answers() -> None:
    exit_ = judged(EXIT, records(np.array([0, 7, 7, 7])))
    assert (exit_.agreement, exit_.accuracy) == pytest.approx((0.75, 0.25))


def test_without_labels_there_is_no_accuracy() -> None:
    exit_ = judged(EXIT, records(None))
    assert (exit_.agreement, exit_.accuracy) == (0.75, None)
