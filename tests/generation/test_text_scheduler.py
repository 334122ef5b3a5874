"""The scheduler of text, rule by rule."""

from __future__ import annotations

import pytest

from offramp.generation.scheduling import (
    NeverFitsError,
    NewSequence,
    PrefillStep,
    RefillPolicy,
    SequenceEnd,
    StepPolicy,
    TextLimits,
    TextOutcome,
    TextQueueFullError,
    TextScheduler,
    TogetherPolicy,
    TokenStep,
    TokenThresholds,
)
from offramp.generation.scheduling.thresholds import OFF

SURE, UNSURE = 0.9, 0.1


class Driven:
    """A scheduler on virtual time, whose steps take a second."""

    def __init__(self, policy: StepPolicy | None = None, queue: int = 64, **limits: object) -> None:
        sizes = {"stages": 2, "slots": 8, "length": 32, "batch": 4, **limits}
        self.limits = TextLimits(**sizes)  # type: ignore[arg-type]
        half = TokenThresholds(version=7, by_stage=(0.5,) * (self.limits.stages - 1))
        self.scheduler = TextScheduler(
            self.limits, policy or RefillPolicy(patience=1000), half, queue=queue
        )
        self.now_s = 0.0
        self.ends: dict[int, SequenceEnd] = {}
        self.tokens: dict[int, list[tuple[int, int]]] = {}
        """Token and stage by sequence."""
        self.versions: dict[int, int] = {}

    def submit(self, *numbers: int, prompt: int = 4, most: int = 8, **more: object) -> None:
        for number in numbers:
            new = NewSequence(
                number=number,
                prompt_tokens=prompt,
                most_tokens=most,
                **more,  # type: ignore[arg-type]
            )
            self.note(self.scheduler.submit(new, self.now_s))

    def note(self, outcome: TextOutcome) -> TextOutcome:
        for given in outcome.given:
            self.tokens.setdefault(given.sequence, []).append((given.token, given.stage))
        for ended in outcome.ended:
            self.ends[ended.sequence] = ended.end
            self.versions[ended.sequence] = ended.thresholds
        return outcome

    def next(self) -> PrefillStep | TokenStep | None:
        decision = self.scheduler.next(self.now_s)
        self.note(decision.outcome)
        return decision.step

    def prefill(self) -> PrefillStep:
        step = self.next()
        assert isinstance(step, PrefillStep)
        self.now_s += 1.0
        self.note(self.scheduler.prefilled(self.now_s))
        return step

    def stage(self, *confidences: float, token: int = 1) -> TokenStep:
        step = self.next()
        assert isinstance(step, TokenStep)
        self.answer(step, *confidences, token=token)
        return step

    def answer(self, step: TokenStep, *confidences: float, token: int = 1) -> TextOutcome:
        said = list(confidences) or [SURE] * len(step.sequences)
        self.now_s += 1.0
        return self.note(self.scheduler.update([token] * len(said), said, self.now_s))

    def fail(self, step: PrefillStep | TokenStep) -> TextOutcome:
        return self.note(self.scheduler.failed(step.sequences, self.now_s))

    def cancel(self, number: int) -> TextOutcome:
        return self.note(self.scheduler.cancel(number))


def test_prompts_run_apart_from_tokens_and_tokens_leave_by_confidence() -> None:
    driven = Driven()
    driven.submit(0, 1, most=2)
    assert driven.prefill().sequences == (0, 1)
    first = driven.next()
    assert first == TokenStep(0, (0, 1), (0, 1), (0.5, 0.5))
    assert isinstance(first, TokenStep)
    outcome = driven.answer(first, SURE, UNSURE, token=5)
    assert [(row.sequence, row.slot, row.token) for row in outcome.accepted] == [(0, 0, 5)]
    assert outcome.left_at == 0
    second = driven.next()
    assert isinstance(second, TokenStep)
    assert (second.stage, second.sequences) == (1, (1,))  # the deepest of equals
    assert second.limits == (0.0,)
    outcome = driven.answer(second, UNSURE, token=6)  # all leave at the model's end
    assert outcome.left_at is None
    assert outcome.accepted[0].token == 6
    assert driven.stage(token=8).sequences == (0, 1)
    assert driven.tokens == {0: [(5, 0), (8, 0)], 1: [(6, 1), (8, 0)]}
    assert driven.ends == {0: SequenceEnd.MOST_TOKENS, 1: SequenceEnd.MOST_TOKENS}
    assert driven.next() is None


@pytest.mark.parametrize(
    ("more", "tokens", "end"),
    [
        ({"most": 3}, 3, SequenceEnd.MOST_TOKENS),
        ({"most": 9, "stop": frozenset({1})}, 1, SequenceEnd.STOP),
        ({"most": 1, "stop": frozenset({1})}, 1, SequenceEnd.STOP),
        ({"most": 99, "prompt": 29}, 3, SequenceEnd.LENGTH),
        ({"most": 3, "prompt": 29}, 3, SequenceEnd.MOST_TOKENS),
        ({"most": 9, "deadline_s": 3.0}, 2, SequenceEnd.EXPIRED),
        ({"most": 2, "deadline_s": 3.0}, 2, SequenceEnd.MOST_TOKENS),
    ],
)
def test_an_answer_ends(more: dict[str, object], tokens: int, end: SequenceEnd) -> None:
    driven = Driven()
    driven.submit(0, **more)  # type: ignore[arg-type]
    driven.prefill()
    while driven.scheduler.sequences:
        driven.stage()
    assert (len(driven.tokens[0]), driven.ends[0]) == (tokens, end)
    assert driven.scheduler.slots_in_use == 0


def test_an_encoder_decoders_prompt_takes_no_room() -> None:
    driven = Driven(prompt_in_slot=False, length=4, longest_prompt=100)
    with pytest.raises(NeverFitsError, match="a prompt of 101 tokens"):
        driven.submit(0, prompt=101)
    driven.submit(0, prompt=100, most=9)
    driven.prefill()
    while driven.scheduler.sequences:
        driven.stage()
    assert (len(driven.tokens[0]), driven.ends[0]) == (4, SequenceEnd.LENGTH)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"prompt": 32}, "does not fit a slot of 32 tokens: send at most 31"),
        ({"prompt": 0}, "a prompt of 0 tokens"),
        ({"most": 0}, "at most 0"),
    ],
)
def test_what_can_never_run_is_refused(more: dict[str, int], message: str) -> None:
    driven = Driven()
    with pytest.raises(NeverFitsError, match=message):
        driven.submit(0, **more)
    assert driven.scheduler.sequences == 0


def test_the_queue_is_bounded_and_in_order() -> None:
    driven = Driven(queue=4, batch=2)
    driven.submit(0)
    driven.submit(1, deadline_s=5.0)
    driven.submit(2, priority=1)
    driven.submit(3, deadline_s=50.0)
    with pytest.raises(TextQueueFullError, match="4 of 4 sequences wait"):
        driven.submit(4)
    driven.submit(5, background=True)  # has a queue of its own
    assert driven.prefill().sequences == (2, 1)
    assert driven.prefill().sequences == (0, 3)  # patient for ten seconds
    assert driven.prefill().sequences == (5,)


def test_what_expires_in_the_queue_makes_room() -> None:
    driven = Driven(queue=1)
    driven.submit(0, deadline_s=1.0)
    driven.now_s = 2.0
    driven.submit(1)
    assert driven.ends == {0: SequenceEnd.EXPIRED}
    assert driven.versions == {0: -1}


def test_a_full_batch_at_the_deepest_stage_goes_first() -> None:
    driven = Driven(stages=3, batch=2, slots=6)
    driven.submit(*range(6))
    for _ in range(3):
        driven.prefill()
    assert driven.stage(UNSURE, UNSURE).stage == 0
    assert driven.stage(UNSURE, UNSURE).stage == 1  # a full batch, and none is deeper
    full = driven.stage(SURE, SURE)
    assert (full.stage, full.sequences) == (2, (0, 1))
    assert driven.stage(UNSURE, SURE).sequences == (2, 3)
    assert driven.stage(SURE, UNSURE).sequences == (4, 5)
    full = driven.stage(UNSURE, UNSURE)
    assert (full.stage, full.sequences) == (1, (2, 5))
    driven.cancel(0)
    driven.submit(6)  # a slot is free
    assert driven.stage().stage == 2
    assert driven.prefill().sequences == (6,)


def test_rows_take_turns() -> None:
    driven = Driven(batch=2, slots=4)
    driven.submit(*range(4))
    driven.prefill(), driven.prefill()
    assert [driven.stage().sequences for _ in range(3)] == [(0, 1), (2, 3), (0, 1)]


def test_a_token_does_not_wait_for_ever() -> None:
    driven = Driven(RefillPolicy(patience=3), batch=2, slots=3)
    driven.submit(0, 1, 2, most=30)
    driven.prefill(), driven.prefill()
    assert driven.stage(UNSURE, SURE).sequences == (0, 1)
    assert [driven.stage().stage for _ in range(3)] == [0, 0, 0]
    late = driven.stage()
    assert (late.stage, late.sequences) == (1, (0,))


def test_a_near_deadline_goes_first() -> None:
    driven = Driven(RefillPolicy(urgent_s=2.0), batch=2, slots=3)
    driven.submit(0, deadline_s=6.0, priority=1)
    driven.submit(1, 2)
    assert driven.prefill().sequences == (0, 1)
    driven.prefill()
    assert driven.stage(UNSURE, SURE).stage == 0  # at 2 s
    assert set(driven.stage().sequences) == {1, 2}  # at 3 s; the fullest
    urgent = driven.stage()
    assert (urgent.stage, urgent.sequences) == (1, (0,))


def test_only_equal_lengths_share_a_step_where_the_backend_is_not_ragged() -> None:
    driven = Driven(ragged=False)
    driven.submit(0, 2, prompt=3)
    driven.submit(1, 3, prompt=5)
    assert driven.prefill().sequences == (0, 2)
    assert driven.prefill().sequences == (1, 3)
    assert driven.stage().sequences == (0, 2)
    assert driven.stage().sequences in {(0, 2), (1, 3)}


def test_encoders_prompts_of_different_lengths_share_a_prefill() -> None:
    driven = Driven(ragged=False, prompt_in_slot=False)
    driven.submit(0, prompt=3)
    driven.submit(1, prompt=5)
    assert driven.prefill().sequences == (0, 1)
    assert driven.stage().sequences == (0, 1)


def test_what_is_cancelled_frees_its_slot_at_once_if_nothing_of_it_runs() -> None:
    driven = Driven(batch=1, slots=2)
    driven.submit(0, 1, 2)
    driven.prefill(), driven.prefill()
    step = driven.next()
    assert isinstance(step, TokenStep)
    assert step.sequences == (0,)
    assert driven.cancel(1).closed == (1,)
    assert driven.cancel(0) == TextOutcome()  # it runs
    assert driven.cancel(2).closed == ()  # it waited in the queue
    assert driven.ends == {1: SequenceEnd.CANCELLED, 2: SequenceEnd.CANCELLED}
    assert driven.answer(step).closed == (0,)
    assert driven.ends[0] is SequenceEnd.CANCELLED
    assert 0 not in driven.tokens
    assert driven.cancel(0) == TextOutcome()


def test_a_batch_that_failed_runs_again_alone_and_who_breaks_it_fails_alone() -> None:
    driven = Driven()
    driven.submit(0, 1, most=3)
    driven.prefill()
    driven.stage(SURE, UNSURE, token=5)
    deep = driven.stage(SURE, token=6)
    assert (deep.stage, deep.sequences) == (1, (1,))
    step = driven.next()
    assert isinstance(step, TokenStep)
    assert (step.stage, step.sequences) == (0, (0, 1))
    assert driven.fail(step).closed == (0, 1)
    assert driven.scheduler.retried == 2
    assert driven.prefill().sequences == (0,)
    assert driven.prefill().sequences == (1,)
    again = driven.next()
    assert isinstance(again, TokenStep)
    assert (again.sequences, again.limits) == ((0,), (0.0,))  # it left here
    replayed = driven.answer(again, UNSURE, token=9)
    assert replayed.left_at == 0  # as before, and with the token of then
    assert [row.token for row in replayed.accepted] == [5]
    assert replayed.given == ()
    went_on = driven.stage(SURE, token=9)
    assert (went_on.sequences, went_on.limits) == ((1,), (OFF,))
    assert driven.stage(token=9).stage == 1
    alone = driven.stage(token=7)
    assert (alone.stage, alone.sequences) == (0, (0,))
    broken = driven.next()
    assert isinstance(broken, TokenStep)
    assert broken.sequences == (1,)
    driven.fail(broken)
    assert driven.ends == {1: SequenceEnd.FAILED}
    driven.stage(token=8)
    assert driven.tokens == {0: [(5, 0), (7, 0), (8, 0)], 1: [(6, 1)]}
    assert driven.ends[0] is SequenceEnd.MOST_TOKENS


def test_who_has_passed_what_failed_shares_steps_again() -> None:
    driven = Driven()
    driven.submit(0, 1, most=3)
    step = driven.next()
    assert isinstance(step, PrefillStep)
    driven.fail(step)
    assert [driven.prefill().sequences for _ in range(2)] == [(0,), (1,)]
    assert driven.stage().sequences == (0, 1)


def test_who_starts_again_joins_no_other_prefill() -> None:
    driven = Driven()
    driven.submit(0, 1)
    step = driven.next()
    assert isinstance(step, PrefillStep)
    driven.fail(step)
    driven.submit(2, 3, priority=1)
    assert [driven.prefill().sequences for _ in range(3)] == [(2, 3), (0,), (1,)]


def test_what_was_cancelled_in_a_step_that_fails_does_not_start_again() -> None:
    driven = Driven()
    driven.submit(0)
    driven.prefill()
    step = driven.next()
    assert isinstance(step, TokenStep)
    driven.cancel(0)
    assert driven.fail(step).closed == (0,)
    assert driven.ends == {0: SequenceEnd.CANCELLED}


def test_a_token_that_runs_as_the_deadline_passes_is_given() -> None:
    driven = Driven()
    driven.submit(0, 1, deadline_s=1.5)
    driven.prefill()
    step = driven.next()
    assert isinstance(step, TokenStep)
    driven.now_s = 2.0
    driven.submit(2)  # others are looked at in the meantime
    assert driven.ends == {}
    outcome = driven.answer(step, SURE, UNSURE)
    assert driven.ends == {0: SequenceEnd.EXPIRED, 1: SequenceEnd.EXPIRED}
    assert driven.tokens == {0: [(1, 0)]}
    assert outcome.accepted == ()
    assert sorted(outcome.closed) == [0, 1]


def test_together_waits_for_all_tokens_and_starts_when_all_have_ended() -> None:
    driven = Driven(TogetherPolicy(), batch=3, slots=6, stages=3)
    driven.submit(*range(5), most=2)
    assert driven.prefill().sequences == (0, 1, 2)
    steps = [
        driven.stage(SURE, UNSURE, UNSURE),
        driven.stage(SURE, UNSURE),
        driven.stage(SURE),
        driven.stage(SURE, SURE, UNSURE),
        driven.stage(UNSURE),
        driven.stage(SURE),
    ]
    assert [(step.stage, len(step.sequences)) for step in steps] == [
        (0, 3),
        (1, 2),
        (2, 1),
        (0, 3),
        (1, 1),
        (2, 1),
    ]
    assert driven.prefill().sequences == (3, 4)


def test_background_gives_way_and_runs_in_full() -> None:
    driven = Driven(slots=1)
    driven.submit(0, background=True, most=2)
    driven.prefill()
    assert driven.stage(SURE, token=5).stage == 0
    driven.submit(1, most=1)
    step = driven.next()
    assert step == PrefillStep((1,), (0,))
    driven.note(driven.scheduler.prefilled(driven.now_s))
    assert driven.scheduler.yielded == 1
    driven.stage()
    assert driven.prefill().sequences == (0,)
    while driven.scheduler.sequences:
        driven.stage(SURE, token=5)
    assert driven.tokens == {1: [(1, 0)], 0: [(5, 1), (5, 1)]}
    assert driven.versions == {1: 7, 0: -1}


def test_the_background_that_has_done_least_gives_way() -> None:
    driven = Driven(slots=2)
    driven.submit(0, background=True, most=9)
    driven.prefill()
    driven.stage(), driven.stage()
    driven.submit(1, background=True)
    driven.prefill()
    driven.submit(2)
    assert driven.prefill() == PrefillStep((2,), (1,))


def test_steps_of_background_alone_wait_for_all_others() -> None:
    driven = Driven(batch=2, slots=4)
    driven.submit(0, 1, background=True)
    driven.submit(2, most=3)
    assert driven.prefill().sequences == (2,)
    assert driven.prefill().sequences == (0, 1)
    assert driven.stage(SURE, SURE).sequences == (2, 0)
    assert set(driven.stage(SURE, SURE).sequences) == {1, 2}
    assert driven.stage(SURE).sequences == (2,)  # though two of the background fill a batch
    assert driven.ends == {2: SequenceEnd.MOST_TOKENS}
    assert driven.stage().sequences == (0, 1)


def test_sequences_keep_the_thresholds_that_they_began_under() -> None:
    driven = Driven()
    driven.submit(0, most=2)
    driven.prefill()
    driven.scheduler.swap(TokenThresholds(version=8, by_stage=(0.95,)))
    driven.submit(1, most=1)
    driven.prefill()
    both = driven.stage(SURE, SURE)
    assert (both.stage, both.limits) == (0, (0.5, 0.95))
    assert driven.tokens == {0: [(1, 0)]}
    driven.stage(), driven.stage()
    assert driven.versions == {0: 7, 1: 8}


def test_thresholds_of_another_model_are_refused() -> None:
    with pytest.raises(ValueError, match="thresholds are for 3 stages, and the model has 2"):
        Driven().scheduler.swap(TokenThresholds.off(3))


def test_a_number_is_not_used_twice() -> None:
    driven = Driven()
    driven.submit(0)
    with pytest.raises(ValueError, match="sequence 0 exists already"):
        driven.submit(0)
