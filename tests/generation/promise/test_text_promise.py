"""Risks of generated text, and thresholds that are certified on prompts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from offramp.certify.decision import MODEL_END, NEVER, FloatArray, IntArray
from offramp.generation.promise.dissimilarity import differs, edit_distance
from offramp.generation.promise.text_promise import (
    TextLosses,
    TextPromise,
    TextRisk,
    certify_levels,
    keeps,
)
from offramp.generation.promise.text_records import TextRecords


def records() -> TextRecords:
    """Two prompts of 3 and 2 tokens, two exits."""
    return TextRecords(
        starts=np.array([0, 3, 5]),
        confidences=np.array([[0.9, 0.2, 0.8, 0.7, 0.1], [0.9, 0.9, 0.9, 0.9, 0.6]], np.float32),
        agrees=np.array([[True, False, False, True, True], [True, True, True, True, False]]),
    )


def test_tokens_leave_at_the_first_exit_that_is_sure() -> None:
    at = records().answered_at(np.array([0.75, 0.7]))
    assert at.tolist() == [0, 1, 0, 1, MODEL_END]
    assert records().wrong(at).tolist() == [False, False, True, False, False]
    assert records().differs(at).tolist() == [True, False]
    assert records().by_prompt(records().wrong(at)).tolist() == [1.0, 0.0]
    assert records().depth(at, np.array([2, 4, 8])) == pytest.approx((2 + 4 + 2 + 4 + 8) / 40)


def test_thresholds_may_depend_on_the_token_s_place() -> None:
    at = records().answered_at(np.array([[NEVER, NEVER, 0.5], [NEVER, 0.5, NEVER]]))
    assert at.tolist() == [MODEL_END, 1, 0, MODEL_END, 1]
    late = records().answered_at(np.array([[NEVER], [0.5]]))
    assert late.tolist() == [1] * 5, "longer outputs have the last ones"


def test_records_of_some_prompts() -> None:
    taken = records().take(np.array([1, 0]))
    assert (taken.starts.tolist(), len(taken)) == ([0, 2, 5], 2)
    assert taken.confidences[0].tolist() == records().confidences[0, [3, 4, 0, 1, 2]].tolist()
    assert taken.places.tolist() == [0, 1, 0, 1, 2]


@pytest.mark.parametrize("starts", [[0, 3], [1, 3, 5], [0, 3, 3, 5], [0]])
def test_prompts_have_to_fill_the_tokens(starts: list[int]) -> None:
    whole = records()
    with pytest.raises(ValueError, match="token"):
        TextRecords(starts=np.array(starts), confidences=whole.confidences, agrees=whole.agrees)


def level(losses: FloatArray, tokens: int | IntArray = 20) -> TextLosses:
    """Losses of prompts with so many tokens."""
    counts = np.broadcast_to(np.asarray(tokens, np.int64), losses.shape)
    return TextLosses(losses=losses, tokens=counts)


def test_whole_outputs_are_certified_as_the_binomial_tail_says() -> None:
    promise = TextPromise(risk=TextRisk.TEXTS, bound=0.01, binary=True)
    losses = np.zeros(2000)
    losses[:12] = 1.0
    assert keeps(level(losses), promise)
    losses[12] = 1.0
    assert not keeps(level(losses), promise), "2,000 prompts allow 12 at 1 % and 95 %"


def test_the_last_level_that_passes_in_turn_is_taken() -> None:
    promise = TextPromise(risk=TextRisk.TEXTS, bound=0.1, binary=True)
    counts = iter((0, 10, 200, 0))
    asked = []

    def levels() -> Iterator[TextLosses]:
        for count in counts:
            asked.append(count)
            yield level((np.arange(400) < count).astype(np.float64))

    found = certify_levels(levels(), promise)
    assert found is not None
    assert (found.level, found.risk, found.prompts) == (1, 10 / 400, 400)
    assert asked == [0, 10, 200], "nothing is tested behind a level that failed"
    assert certify_levels([level(np.ones(400))], promise) is None


@pytest.mark.parametrize("risk", list(TextRisk))
def test_a_risk_at_the_bound_passes_in_no_more_than_delta(risk: TextRisk) -> None:
    """2,000 draws of 300 prompts whose true risk is the bound; wrong answers are longer ones."""
    rng = np.random.default_rng(0)
    promise = TextPromise(risk=risk, bound=0.05, confidence_level=0.9, most_tokens=30)
    passed = 0
    for _ in range(2000):
        if risk is TextRisk.TOKENS:
            bad = rng.random(300) < 0.5
            tokens = np.where(bad, rng.integers(8, 14, 300), rng.integers(7, 13, 300))
            passed += keeps(level(bad.astype(np.float64), tokens), promise)
        else:
            passed += keeps(level(np.where(rng.random(300) < 0.1, 0.5, 0.0)), promise)
    assert 0 < passed <= 0.1 * 2000


def test_a_small_risk_is_certified_with_few_prompts() -> None:
    rng = np.random.default_rng(1)
    promise = TextPromise(risk=TextRisk.TOKENS, bound=0.01)
    tokens = rng.integers(10, 40, 400)
    wrong = (rng.random(400) < 0.004 * tokens).astype(np.float64)
    assert keeps(level(wrong, tokens), promise)
    assert not keeps(level((rng.random(400) < 0.02 * tokens).astype(np.float64), tokens), promise)
    small = np.where(rng.random(2000) < 0.05, 0.1, 0.0)
    assert keeps(level(small), TextPromise(risk=TextRisk.TEXTS, bound=0.01))


def test_the_risk_is_by_tokens_or_by_answers() -> None:
    seen = level(np.array([1.0, 0.0]), np.array([4, 6]))
    assert (seen.risk(TextRisk.TOKENS), seen.risk(TextRisk.TEXTS)) == (0.1, 0.5)
    assert seen.take(np.array([1])).risk(TextRisk.TEXTS) == 0


def test_lengths_beyond_what_was_said_are_refused() -> None:
    promise = TextPromise(risk=TextRisk.TOKENS, bound=0.1, most_tokens=9)
    with pytest.raises(ValueError, match=r"10 tokens.*9"):
        keeps(level(np.zeros(2), np.array([3, 10])), promise)


def test_losses_do_not_choose_their_test() -> None:
    """By the binomial tail 300 answers without any loss pass, by betting 500."""
    binary = TextPromise(risk=TextRisk.TEXTS, bound=0.01, binary=True)
    some = TextPromise(risk=TextRisk.TEXTS, bound=0.01)
    nothing = [level(np.zeros(count)) for count in (300, 500)]
    assert [keeps(losses, binary) for losses in nothing] == [True, True]
    assert [keeps(losses, some) for losses in nothing] == [False, True]
    with pytest.raises(ValueError, match="binary"):
        keeps(level(np.array([0.5])), binary)


def test_losses_must_be_shares() -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        keeps(level(np.array([2.0])), TextPromise(risk=TextRisk.TEXTS, bound=0.1))


@pytest.mark.parametrize(
    ("found", "expected", "distance"),
    [("", "", 0), ("abc", "abc", 0), ("abc", "abd", 1 / 3), ("abc", "bc", 1 / 3),
     ("kitten", "sitting", 3 / 7), ("", "ab", 1), ("ab", "", 1), ("abcd", "xbcy", 1 / 2),
     ("axbycz", "abc", 1 / 2)],
)  # fmt: skip
def test_edit_distances(found: str, expected: str, distance: float) -> None:
    a, b = list(map(ord, found)), list(map(ord, expected))
    assert edit_distance(a, b) == edit_distance(b, a) == pytest.approx(distance)
    assert differs(a, b) == float(found != expected)
