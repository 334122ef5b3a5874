"""The simulator against closed forms. All times are exact: halves, quarters and their sums."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from offramp.generation.scheduling import (
    RecordedText,
    RefillPolicy,
    SequenceEnd,
    StepPolicy,
    StepSeconds,
    TextLimits,
    TogetherPolicy,
    simulate_text,
)

LIMITS = TextLimits(stages=2, slots=4, length=64, batch=4)
SECONDS = StepSeconds(
    prefill=(0.0, 1.0, 1.5, 2.0, 2.5),
    stages=((0.0, 0.5, 0.625, 0.75, 0.875), (0.0, 1.0, 1.25, 1.5, 1.75)),
)


def texts(count: int, *depths: int) -> list[RecordedText]:
    return [RecordedText(prompt_tokens=3, depths=depths)] * count


@pytest.mark.parametrize("policy", [RefillPolicy(), TogetherPolicy()])
def test_one_sequence_takes_the_sum_of_its_steps(policy: StepPolicy) -> None:
    simulated = simulate_text(LIMITS, policy, SECONDS, texts(1, 0, 1, 0))
    assert simulated.span_s == 1.0 + 3 * 0.5 + 1.0
    assert simulated.tokens_per_s == 3 / 3.5
    assert simulated.first_token_s.tolist() == [1.5]
    assert simulated.between_tokens_s.tolist() == [1.5, 0.5]
    assert simulated.counts.tokens == (2, 1)
    assert simulated.counts.full_places == (0.25, 0.25)


@pytest.mark.parametrize("policy", [RefillPolicy(), TogetherPolicy()])
def test_a_full_batch_in_full_takes_both_stages_for_each_token(policy: StepPolicy) -> None:
    simulated = simulate_text(LIMITS, policy, SECONDS, texts(8, 1, 1, 1))
    assert simulated.span_s == 2 * (2.5 + 3 * (0.875 + 1.75))
    assert simulated.counts.full_places == (1.0, 1.0)
    assert simulated.counts.prefills == 2


def test_refilling_keeps_the_deep_batch_full() -> None:
    """With 8 slots and alternating depths both stages always run full, in the least time.

    Eight sequences of 4 tokens, of which each second runs both stages.
    """
    limits = replace(LIMITS, slots=8)
    mixed = [*texts(4, 0, 1, 0, 1), *texts(4, 1, 0, 1, 0)]
    simulated = simulate_text(limits, RefillPolicy(), SECONDS, mixed)
    assert simulated.counts.full_places == (1.0, 1.0)
    assert simulated.span_s == 2 * 2.5 + 8 * 0.875 + 4 * 1.75


def test_together_waits_for_the_deepest_row() -> None:
    mixed = [*texts(2, 0, 1, 0, 1), *texts(2, 1, 0, 1, 0)]
    simulated = simulate_text(LIMITS, TogetherPolicy(), SECONDS, mixed)
    assert simulated.span_s == 2.5 + 4 * (0.875 + 1.25)
    assert simulated.counts.full_places == (1.0, 0.5)


def test_together_leaves_the_places_of_those_that_ended_empty() -> None:
    simulated = simulate_text(LIMITS, TogetherPolicy(), SECONDS, [*texts(3, 0), *texts(2, 0, 0)])
    assert simulated.span_s == 2.5 + 0.875 + 0.5 + 1.0 + 2 * 0.5


def test_arrivals_and_deadlines() -> None:
    late = RecordedText(prompt_tokens=3, depths=(0,) * 5, arrives_s=10.0, slo_s=2.0)
    simulated = simulate_text(LIMITS, RefillPolicy(), SECONDS, [late, *texts(1, 0)])
    assert simulated.span_s == 12.0
    assert simulated.counts.tokens == (1 + 2, 0)  # the last one just as the deadline passes
    assert simulated.counts.ended[SequenceEnd.EXPIRED] == 1
    assert simulated.first_token_s.tolist() == [1.5, 1.5]


def test_a_full_queue_refuses() -> None:
    simulated = simulate_text(LIMITS, RefillPolicy(), SECONDS, texts(9, 0), queue=5)
    assert simulated.refused == 4
    assert simulated.counts.ended[SequenceEnd.MOST_TOKENS] == 5


def test_the_report_is_labelled() -> None:
    report = simulate_text(LIMITS, RefillPolicy(), SECONDS, texts(4, 0, 1)).report()
    assert report["label"] == "SIMULATED"
    assert report["token_ms_mean"] == (0.875 + 1.75) * 1e3
    assert json.loads(json.dumps(report)) == report
    assert (
        simulate_text(LIMITS, RefillPolicy(), SECONDS, texts(1, 0)).report()["token_ms_p99"] is None
    )


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="seconds must be of 3 stages and of 1 to 4 rows"):
        simulate_text(replace(LIMITS, stages=3), RefillPolicy(), SECONDS, texts(1, 0))
    with pytest.raises(ValueError, match="text 0: depths must be at least one stage from 0 to 1"):
        simulate_text(LIMITS, RefillPolicy(), SECONDS, texts(1, 0, 2))
