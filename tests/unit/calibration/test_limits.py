"""Messages if no exit is active: the limiting condition, its value, and the remedy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.facts import tells

from offramp.bundle import Head, Measured, MeasuredSize, Ratio
from offramp.bundle.schema.parts import HeadScore
from offramp.calibration.choose.exit_records import ExitRecords
from offramp.calibration.choose.limits import (
    PolicyTerms,
    limit_of_certificate,
    limit_of_choice,
    limit_of_heads,
    limit_of_rehearsal,
    limit_of_samples,
    measured_loss,
)
from offramp.certify import allowed_errors, tuning_path
from offramp.engine.control.costs import CostModel

ONE = Ratio(value=1.0, half_width=0.1)


@pytest.mark.parametrize(
    ("busy", "half_width", "lost"), [(1.66, 0.04, True), (1.66, 0.7, False), (0.4, 0.01, False)]
)
def test_exits_that_were_surely_measured_to_lose_are_not_used(
    busy: float, half_width: float, lost: bool
) -> None:
    def size(batch_size: int, ratio: Ratio) -> MeasuredSize:
        return MeasuredSize(
            batch_size=batch_size, rounds=12, samples=600, mean=ONE, median=ONE, busy=ratio,
            nothing_exits=ONE,
        )  # fmt: skip

    sizes = (size(1, ONE), size(16, Ratio(value=busy, half_width=half_width)))
    measured = Measured(device="cpu", threads=1, samples=100, agreement=1.0, sizes=sizes)
    assert measured_loss(measured, 1) is None
    limit = measured_loss(measured, 8)
    assert (limit is not None) == lost
    if limit is not None:
        told = "with exits the model took 1.66 ± 0.04 of its own time at batch 16, measured here"
        assert limit.startswith(told)


TERMS = PolicyTerms(max_disagreement=0.05, confidence_level=0.9, max_overhead=None, batch_size=8)
COST = CostModel(
    source_ms=10.0,
    segments_ms=(2.0, 3.0, 5.0),
    stages_ms=(0.1, 0.1),
    after_segment=(0, 1),
    exits_ms=(0.2, 0.2),
)


def records(shares_known: list[float], *, count: int = 2000, wrong: float = 0.5) -> ExitRecords:
    """Exits that are sure and right on a share of the samples, else guess."""
    rng = np.random.default_rng(0)
    hardness = rng.random(count)
    confidence, agrees = [], []
    for share in shares_known:
        easy = hardness < share
        confidence.append(np.where(easy, rng.uniform(0.9, 1, count), rng.uniform(0.4, 0.6, count)))
        agrees.append(easy | (rng.random(count) < 1 - wrong))
    return ExitRecords(
        confidence=np.array(confidence, np.float32),
        prediction=np.array(agrees, np.int32),
        final_prediction=np.ones(count, np.int32),
        final_confidence=np.ones(count, np.float32),
        labels=None,
    )


def test_heads_that_agree_too_little() -> None:
    limit = limit_of_heads([scored(0.4, -0.02), scored(0.783, -0.018)], 10.0, TERMS)
    assert "none of the 2 candidate exits" in limit
    assert "78.3%" in limit
    assert "0.05 disagree (--max-disagreement)" in limit
    assert "--exits" in limit_of_heads([], 10.0, TERMS)


def scored(agreement: float, net_savings: float, cost_ms: float = 0.2) -> HeadScore:
    head = Head(kind="vector")
    return HeadScore(head=head, agreement=agreement, cost_ms=cost_ms, net_savings=net_savings)


def test_heads_that_cost_more_than_they_save() -> None:
    limit = limit_of_heads([scored(0.999, -0.1, cost_ms=4.0), scored(0.9, -0.02)], 10.0, TERMS)
    assert "would save 30.0% of the model's 10 ms" in limit
    assert "takes 4 ms (40.0%)" in limit


def test_a_rehearsal_that_keeps_nothing_names_its_own_limit() -> None:
    limit = limit_of_rehearsal(0.02, 0.3)
    assert "--max-violations 0.02" in limit
    assert "--min-gain 0.3" in limit


def test_exits_that_agree_too_little() -> None:
    limit = limit_of_choice(records([0.0, 0.0], wrong=0.6), {8: COST}, TERMS)
    assert "even if exits cost nothing, 0.0%" in limit
    assert "--max-disagreement" in limit


def test_exits_that_cost_too_much() -> None:
    dear = replace(COST, exits_ms=(8.0, 8.0), stages_ms=(1.5, 1.5))
    limit = limit_of_choice(records([0.3, 0.8]), {1: dear, 8: dear}, TERMS)
    assert "of the model's 10 ms" in limit
    assert "head takes 8 ms and its border 1.5 ms (95.0%)" in limit
    assert "--reference-batch-size" not in limit
    elsewhere = limit_of_choice(records([0.3, 0.8]), {8: dear, 32: COST}, TERMS)
    assert elsewhere.endswith("--reference-batch-size 32")


def test_an_overhead_that_was_not_allowed() -> None:
    limit = limit_of_choice(records([0.3, 0.8]), {8: COST}, replace(TERMS, max_overhead=0.01))
    assert limit.startswith("--max-overhead 0.01: exits 0, 1 would save ")
    assert "add 6.0% (certainly 6.0%) at batch 8" in limit
    assert "cheapest exit alone certainly adds 3.0%" in limit
    assert "with --max-overhead 0.06," in limit


def test_data_that_certifies_nothing() -> None:
    tune, certify = records([0.3, 0.8]), records([0.0, 0.0], count=300, wrong=0.6)
    certify = replace(certify, confidence=records([0.3, 0.8], count=300).confidence)
    path = tuning_path(tune.confidence, tune.agrees)
    limit = limit_of_certificate((0, 1), path, certify, TERMS)
    allowed = allowed_errors(300, 0.05, 0.9)
    assert f"at most {allowed} may" in limit
    assert "disagreement ≤ 0.05 with confidence 0.9" in limit
    assert "more --data" in limit


def test_samples_too_few_for_any_policy() -> None:
    """45 samples pass at 5 % and 90 % confidence if all agree: 0.95^45 < 0.1 < 0.95^44."""
    limit = limit_of_samples(44, TERMS)
    assert limit is not None
    tells(limit, "44 certify samples", "too few", "0.05")
    tells(limit, "confidence 0.9", "45 are the least")
    assert "more --data" in limit
    assert limit_of_samples(45, TERMS) is None


@pytest.mark.parametrize(("errors", "samples"), [(0.0, 100), (0.03, 542)])
def test_the_samples_that_would_do_are_named(errors: float, samples: int) -> None:
    from offramp.calibration.choose.limits import _samples_for

    found = _samples_for(errors, TERMS)
    assert found is not None
    assert errors * found <= allowed_errors(found, 0.05, 0.9)
    assert found <= samples
    assert _samples_for(0.06, TERMS) is None


def test_a_quantised_model_that_is_no_faster() -> None:
    slow = CostModel(
        source_ms=10.0,
        segments_ms=(12.0, 10.0),
        stages_ms=(0.1,),
        after_segment=(0,),
        exits_ms=(0.0,),
        source_begins=1,
    )
    limit = limit_of_choice(records([0.99], wrong=0.01), {8: slow}, TERMS)
    assert "takes 12 ms at batch 8, the unmodified one 10 ms" in limit
    assert "--precision fp32" in limit
