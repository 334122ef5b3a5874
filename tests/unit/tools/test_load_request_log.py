from __future__ import annotations

import numpy as np
import pytest

from offramp.certify.decision import MODEL_END
from offramp.tools.bench.common.outcomes import Status
from offramp.tools.bench.load.request_log import UNKNOWN, Reply, RequestLog, RequestRecords, merge


def records() -> RequestRecords:
    """Return records of an answered, an expired, a lost and an unsent request."""
    log = RequestLog()
    for sample, intended_s in ((4, 0.0), (5, 1.0), (6, 2.0), (7, 3.0)):
        log.open(sample=sample, intended_s=intended_s)
    log.sent(0, 0.25)
    log.sent(1, 1.0)
    log.failed(1, 1.5, Status.EXPIRED)
    log.answered(0, 1.25, Reply(exit=2, forced=True, prediction=9))
    log.sent(2, 2.125)
    return log.close()


def test_a_line_says_how_each_request_ended() -> None:
    found = records()
    assert found.sample.tolist() == [4, 5, 6, 7]
    assert found.status.tolist() == [
        Status.OK,
        Status.EXPIRED,
        Status.UNANSWERED,
        Status.UNANSWERED,
    ]
    assert found.exit.tolist() == [2, MODEL_END, MODEL_END, MODEL_END]
    assert found.forced.tolist() == [True, False, False, False]
    assert found.prediction.tolist() == [9, UNKNOWN, UNKNOWN, UNKNOWN]


def test_latency_counts_from_when_it_was_to_be_sent() -> None:
    outcomes = records().to_outcomes(None, duration_s=4.0)
    assert outcomes.latency_s[0] == 1.25  # 1.0 since it was sent
    assert np.isnan(outcomes.latency_s[1:]).all()
    assert outcomes.intended_s.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert outcomes.agrees.tolist() == [-1, -1, -1, -1]
    assert outcomes.duration_s == 4.0


@pytest.mark.parametrize(("truth", "agrees"), [(9, 1), (8, 0), (UNKNOWN, -1)])
def test_agreement_is_known_of_what_was_answered_and_asked(truth: int, agrees: int) -> None:
    reference = np.full(8, 1, np.int64)
    reference[4] = truth
    outcomes = records().to_outcomes(reference, duration_s=4.0)
    assert outcomes.agrees.tolist() == [agrees, -1, -1, -1]


def test_lateness_is_of_what_was_sent_after_the_warm_up() -> None:
    assert records().lateness_s(0.0).tolist() == [0.25, 0.0, 0.125]
    assert records().lateness_s(1.5).tolist() == [0.125]


def test_requests_in_flight_are_counted_from_sending_to_end() -> None:
    assert records().peak_in_flight() == 2  # the first two; the first has ended at 1.25
    assert RequestLog().close().peak_in_flight() == 0


def test_parts_are_merged_in_order_of_intended_sending() -> None:
    other = RequestLog()
    for sample, intended_s in ((0, 0.5), (1, 2.5)):
        other.open(sample=sample, intended_s=intended_s)
    merged = merge([records(), other.close()])
    assert merged.sample.tolist() == [4, 0, 5, 6, 1, 7]
    assert merged.status[0] == Status.OK
    assert merged.exit.dtype == np.int16
