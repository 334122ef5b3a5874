"""Effect of thresholds on given records."""

from __future__ import annotations

import numpy as np
import pytest

from offramp.bundle.schema.policy import NEVER
from offramp.certify import Records, evaluate, savings_of

CONFIDENCE = np.array([[0.9, 0.5, 0.2, 0.9], [0.8, 0.7, 0.6, 0.1]], dtype=np.float32)
AGREES = np.array([[True, False, True, False], [True, True, False, True]])
LATENCY_MS = np.array([1.0, 2.0, 4.0])


def test_a_sample_exits_at_the_first_exit_that_reaches_its_threshold() -> None:
    found = evaluate(CONFIDENCE, AGREES, LATENCY_MS, np.array([0.75, 0.55]))
    # samples 0 and 3 leave at exit 0, where 3 is wrong; 1 and 2 at exit 1, where 2 is wrong
    assert found.errors == 2
    assert found.disagreement == 0.5
    assert found.exit_shares.tolist() == [0.5, 0.5, 0.0]
    assert found.savings == pytest.approx((4 - 1.5) / 4, abs=1e-15)


def test_equal_to_the_threshold_exits() -> None:
    found = evaluate(CONFIDENCE, AGREES, LATENCY_MS, np.array([0.5, NEVER]))
    assert found.exit_shares.tolist() == [0.75, 0.0, 0.25]


def test_without_exits_nothing_is_saved_and_nothing_disagrees() -> None:
    found = evaluate(CONFIDENCE, AGREES, LATENCY_MS, np.array([NEVER, NEVER]))
    assert (found.savings, found.disagreement, found.errors) == (0.0, 0.0, 0)
    assert found.exit_shares.tolist() == [0.0, 0.0, 1.0]


def test_savings_count_against_the_vanilla_model_where_it_is_given() -> None:
    never = np.array([NEVER, NEVER])
    found = evaluate(CONFIDENCE, AGREES, LATENCY_MS, never, vanilla_ms=3.2)
    assert found.savings == pytest.approx((3.2 - 4) / 3.2, abs=1e-15)  # the ramps' cost


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"confidence": CONFIDENCE[0]}, r"confidence must be \[exits, samples\]"),
        ({"confidence": CONFIDENCE[:, :0], "agrees": AGREES[:, :0]}, "no exits or no samples"),
        ({"agrees": AGREES[:, :3]}, r"agrees must be bool\[2, 4\]"),
        ({"agrees": AGREES.astype(np.int64)}, "agrees must be bool"),
        ({"latency_ms": LATENCY_MS[:2]}, "latency_ms must have 3 entries"),
        ({"latency_ms": np.array([1.0, np.nan, 2.0])}, "latency_ms must be finite and above 0"),
        ({"latency_ms": np.array([0.0, 1.0, 2.0])}, "latency_ms must be finite and above 0"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict[str, np.ndarray], message: str) -> None:
    fields = {"confidence": CONFIDENCE, "agrees": AGREES, "latency_ms": LATENCY_MS, **change}
    with pytest.raises(ValueError, match=message):
        Records(**fields)
    with pytest.raises(ValueError, match=message):
        evaluate(**fields, thresholds=np.array([0.5, 0.5]))


@pytest.mark.parametrize("value", [np.nan, np.inf, -0.1, 1.5])
def test_a_confidence_outside_0_to_1_is_refused_with_its_place(value: float) -> None:
    confidence = CONFIDENCE.copy()
    confidence[1, 2] = value
    with pytest.raises(ValueError, match="confidence of exit 1, sample 2 is"):
        Records(confidence=confidence, agrees=AGREES, latency_ms=LATENCY_MS)


@pytest.mark.parametrize("thresholds", [[0.5], [0.5, np.nan], [[0.5, 0.5]]])
def test_thresholds_that_do_not_fit_are_refused(thresholds: list[float]) -> None:
    with pytest.raises(ValueError, match="thresholds must be 2 numbers"):
        evaluate(CONFIDENCE, AGREES, LATENCY_MS, np.array(thresholds))


def test_savings_of_no_answers_are_refused() -> None:
    counts = np.array([[2, 1, 1], [0, 0, 4]])
    assert savings_of(counts, LATENCY_MS) == pytest.approx([0.5, 0.0], abs=1e-15)
    for nobody in (counts * [[1], [0]], counts[0] * 0):
        with pytest.raises(ValueError, match="no samples to judge by"):
            savings_of(nobody, LATENCY_MS)


def test_a_vanilla_time_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="vanilla_ms"):
        evaluate(CONFIDENCE, AGREES, LATENCY_MS, np.array([0.5, 0.5]), vanilla_ms=0.0)


def test_records_take_lists_and_round_confidence_as_served() -> None:
    records = Records.of([[0.1, 0.2]], [[True, False]], [1, 2])
    assert records.confidence.dtype == np.float32
    assert (records.exits, records.samples) == (1, 2)
