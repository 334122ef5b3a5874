"""Records of exits: the worst of several batch sizes."""

from __future__ import annotations

import numpy as np

from offramp.calibration.choose.exit_records import ExitRecords, worst_of


def records(confidence: list[float], prediction: list[int], final: list[int]) -> ExitRecords:
    return ExitRecords(
        confidence=np.array([confidence], np.float32),
        prediction=np.array([prediction], np.int32),
        final_prediction=np.array(final, np.int32),
        final_confidence=np.ones(len(final), np.float32),
        labels=None,
    )


def test_an_exit_that_errs_in_any_batch_errs_and_is_as_sure_as_ever():
    first = records([0.5, 0.9, 0.2], [1, 1, 1], [1, 1, 2])
    second = records([0.7, 0.8, 0.2], [1, 3, 2], [1, 1, 1])

    worst = worst_of([first, second])

    assert worst.agrees.tolist() == [[True, False, False]]
    assert worst.final_prediction.tolist() == [1, 1, 2]
    np.testing.assert_array_equal(worst.confidence, np.float32([[0.7, 0.9, 0.2]]))
    assert worst_of([first]).prediction.tolist() == [[1, 1, 1]]
