"""Generating text for many callers: streams, ends, audits, drain, close and what breaks."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from offramp.engine.common.errors import (
    BackendError,
    BadInputError,
    DeadlineExceededError,
    DrainingError,
    OutOfServiceError,
    QueueFullError,
)
from offramp.generation.scheduling import SequenceEnd, TokenThresholds
from offramp.generation.serving import GeneratingModel, TextOptions, Token
from offramp.generation.serving.text_differences import compare_texts
from tests.generation.scripted_backend import VOCABULARY, ScriptedTextBackend, Tokens

THRESHOLDS = TokenThresholds(version=1, by_stage=(0.7, 0.7))
WAIT_S = 30.0


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, WAIT_S))


async def collect(model: GeneratingModel, prompt: Sequence[int], **more: Any) -> list[Token]:
    return [token async for token in model.generate(prompt, **{"most_tokens": 12, **more})]


class Gate:
    """Holds calls of a backend until it is opened."""

    def __init__(self, method: str = "run") -> None:
        self.method = method
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, method: str, slots: Sequence[int]) -> None:
        if method == self.method:
            self.reached.set()
            assert self.open.wait(WAIT_S)

    async def wait(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, WAIT_S)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what a thread does sets no event here
        await asyncio.sleep(0.001)


def prompts(count: int) -> list[Tokens]:
    draw = np.random.default_rng(3)
    return [tuple(draw.integers(0, VOCABULARY, draw.integers(1, 9)).tolist()) for _ in range(count)]


def test_many_callers_get_their_own_answers() -> None:
    async def test() -> None:
        backend = ScriptedTextBackend()
        stop = frozenset({3})
        async with GeneratingModel(backend, THRESHOLDS, TextOptions(batch=4)) as model:
            asked = prompts(60)
            answers = await asyncio.gather(*(collect(model, p, stop=stop) for p in asked))
            statistics = model.statistics()
        ends = []
        for prompt, answer in zip(asked, answers, strict=True):
            tokens, depths = backend.reference(prompt, THRESHOLDS, 12, stop)
            assert tuple(token.token for token in answer) == tokens
            assert tuple(token.stage for token in answer) == depths
            assert [token.end for token in answer[:-1]] == [None] * (len(answer) - 1)
            ends.append(answer[-1].end)
            assert all(token.confidence == 1.0 for token in answer if token.stage == 2)
        assert set(ends) == {SequenceEnd.STOP, SequenceEnd.MOST_TOKENS}
        counts = statistics.counts
        assert sum(counts.tokens) == sum(map(len, answers))
        assert all(counts.tokens)
        assert counts.ended[SequenceEnd.STOP] == ends.count(SequenceEnd.STOP)
        assert (statistics.open, statistics.queued, statistics.slots_in_use) == (0, 0, 0)
        assert (statistics.slots, statistics.thresholds) == (8, 1)
        assert backend.closed

    run(test())


def test_tokens_arrive_one_by_one() -> None:
    async def test() -> None:
        gate = Gate()
        backend = ScriptedTextBackend(stages=1)
        async with GeneratingModel(backend, TokenThresholds.off(1)) as model:
            stream = model.generate([1, 2], most_tokens=3)
            await anext(stream)
            backend.on_call = gate
            await asyncio.sleep(0)
            gate.open.set()
            assert len([token async for token in stream]) == 2

    run(test())


def test_closing_the_iterator_cancels() -> None:
    async def test() -> None:
        backend = ScriptedTextBackend(length=10_000)
        async with GeneratingModel(backend, THRESHOLDS) as model:
            async with aclosing(model.generate([1], most_tokens=9_000)) as stream:
                async for token in stream:
                    assert token.end is None
                    break
            await until(lambda: model.statistics().slots_in_use == 0)
            counts = model.statistics().counts
            assert counts.ended[SequenceEnd.CANCELLED] == 1
            assert sum(counts.ended.values()) == 1
            assert model.statistics().open == 0

    run(test())


def test_a_cancelled_task_cancels_what_waits_in_the_queue() -> None:
    async def test() -> None:
        gate = Gate()
        backend = ScriptedTextBackend(slots=1, on_call=gate)
        async with GeneratingModel(backend, THRESHOLDS) as model:
            first = asyncio.create_task(collect(model, [1]))
            await gate.wait()
            second = asyncio.create_task(collect(model, [2]))
            await until(lambda: model.statistics().queued == 1)
            second.cancel()
            await until(lambda: model.statistics().queued == 0)
            gate.open.set()
            assert (await first)[-1].end is not None

    run(test())


def test_a_deadline_ends_an_answer_after_some_tokens() -> None:
    async def test() -> None:
        backend = ScriptedTextBackend(stages=1, length=1000)
        looks = itertools.count()

        def clock() -> float:
            """Pass the deadline by itself: the model may be done before a token is read."""
            return 100.0 if next(looks) < 50 else 101.0

        async with GeneratingModel(backend, TokenThresholds.off(1), clock=clock) as model:
            with pytest.raises(DeadlineExceededError, match=r"passed after [1-9]\d* tokens"):
                await collect(model, [1], most_tokens=999, deadline_s=101.0)
            with pytest.raises(DeadlineExceededError, match="after 0 tokens"):
                await collect(model, [1], deadline_s=100.5)
            assert model.statistics().counts.ended[SequenceEnd.EXPIRED] == 2

    run(test())


@pytest.mark.parametrize(
    ("prompt", "more", "message"),
    [
        ([], {}, r"at least one; got float64 of shape \[0\]"),
        ([[1, 2]], {}, r"of shape \[1, 2\]"),
        ([0.5], {}, "got float64"),
        ([1] * 32, {}, "does not fit a slot of 32 tokens: send at most 31"),
        ([1, 12], {}, "tokens from 1 to 12, expected 0 to 11"),
        ([-1, 2], {}, "tokens from -1 to 2, expected 0 to 11"),
        ([1], {"most_tokens": 0}, "an answer of at most 0"),
    ],
)
def test_what_can_never_be_served_is_refused(prompt: Any, more: Any, message: str) -> None:
    async def test() -> None:
        async with GeneratingModel(ScriptedTextBackend(), THRESHOLDS) as model:
            with pytest.raises(BadInputError, match=message):
                await collect(model, prompt, **more)
            assert model.statistics().open == 0
            assert await model.drain(0.0)

    run(test())


def test_a_full_queue_refuses() -> None:
    async def test() -> None:
        gate = Gate()
        backend = ScriptedTextBackend(slots=1, on_call=gate)
        async with GeneratingModel(backend, THRESHOLDS, TextOptions(queue=1)) as model:
            first = asyncio.create_task(collect(model, [1]))
            await gate.wait()
            second = asyncio.create_task(collect(model, [2]))
            await until(lambda: model.statistics().queued == 1)
            with pytest.raises(QueueFullError, match="1 of 1 sequences wait"):
                await collect(model, [3])
            gate.open.set()
            await asyncio.gather(first, second)

    run(test())


def test_the_model_fails_on_one_sequence_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        poison = (5, 5)

        def on_call(method: str, slots: Sequence[int]) -> None:
            if method == "run" and any(backend.opened[s].prompt == poison for s in slots):
                raise BackendError("poisoned")

        backend = ScriptedTextBackend(on_call=on_call)
        async with GeneratingModel(backend, THRESHOLDS, TextOptions(batch=4)) as model:
            asked = [*prompts(10), poison]
            answers = await asyncio.gather(
                *(collect(model, p) for p in asked), return_exceptions=True
            )
            retried = model.statistics().retried
        failure = answers.pop()
        assert isinstance(failure, BackendError)
        assert "failed on this sequence twice: poisoned" in str(failure)
        for prompt, answer in zip(asked, answers, strict=False):
            tokens, _ = backend.reference(prompt, THRESHOLDS, 12, frozenset())
            assert isinstance(answer, list)
            assert tuple(token.token for token in answer) == tokens
        assert 1 <= retried <= 8
        assert "failed: poisoned" in caplog.text

    run(test())


def test_a_model_that_is_out_of_service_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        backend = ScriptedTextBackend()
        model = GeneratingModel(backend, THRESHOLDS)

        def broken(*_: object) -> None:
            raise ZeroDivisionError("our own bug")

        monkeypatch.setattr(model._scheduler, "update", broken)
        async with model:
            answers = await asyncio.gather(
                *(collect(model, [n]) for n in range(3)), return_exceptions=True
            )
            for answer in answers:
                assert isinstance(answer, OutOfServiceError)
                assert "our own bug" in str(answer)
            with pytest.raises(OutOfServiceError, match="our own bug"):
                await collect(model, [1])
        assert backend.closed

    run(test())


def test_draining_finishes_what_is_open_and_refuses_more() -> None:
    async def test() -> None:
        gate = Gate()
        backend = ScriptedTextBackend(on_call=gate)
        async with GeneratingModel(backend, THRESHOLDS) as model:
            first = asyncio.create_task(collect(model, [1]))
            await gate.wait()
            assert not await model.drain(0.01)
            with pytest.raises(DrainingError, match="takes no new sequences"):
                await collect(model, [2])
            gate.open.set()
            assert await model.drain(WAIT_S)
            assert len(await first) == 12

    run(test())


def test_closing_fails_what_is_open() -> None:
    async def test() -> None:
        backend = ScriptedTextBackend(length=100_000)
        model = await GeneratingModel(backend, THRESHOLDS).open()
        stream = model.generate([1], most_tokens=99_999)
        await anext(stream)
        await model.close()
        assert backend.closed
        with pytest.raises(DrainingError, match="was closed"):
            while True:
                await anext(stream)

    run(test())


def test_a_model_that_was_never_opened_is_closed() -> None:
    async def test() -> None:
        backend = ScriptedTextBackend()
        model = GeneratingModel(backend, THRESHOLDS)
        with pytest.raises(RuntimeError, match="not open"):
            await collect(model, [1])
        await model.close()
        assert backend.closed

    run(test())


@pytest.mark.parametrize("propagates", [True, False])
def test_audits_compare_with_the_full_model(propagates: bool) -> None:
    async def test() -> None:
        backend = ScriptedTextBackend(propagates=propagates)
        options = TextOptions(batch=4, audit_share=1.0)
        asked = prompts(40)
        async with GeneratingModel(backend, THRESHOLDS, options) as model:
            answers = await asyncio.gather(*(collect(model, prompt) for prompt in asked))
            await until(lambda: model.statistics().audits.texts == 40)
            statistics = model.statistics()
        off = TokenThresholds.off(3)
        differences = [
            compare_texts(
                [token.token for token in answer],
                backend.reference(prompt, off, 12, frozenset())[0],
            )
            for prompt, answer in zip(asked, answers, strict=True)
        ]
        audits = statistics.audits
        assert 0 < audits.differing < 40 or propagates
        assert audits.differing == sum(difference.differs for difference in differences)
        assert audits.differing_tokens == audits.differing
        assert audits.tokens == sum(difference.compared for difference in differences)
        assert audits.edits == pytest.approx(sum(difference.edits for difference in differences))
        assert (audits.pending, audits.skipped, audits.lost) == (0, 0, 0)
        assert sum(statistics.counts.tokens) == 40 * 12  # audits are not among them
        assert statistics.counts.ended[SequenceEnd.MOST_TOKENS] == 40

    run(test())


def test_a_share_of_answers_is_audited() -> None:
    async def test() -> None:
        options = TextOptions(audit_share=0.5, audit_seed=1)
        async with GeneratingModel(ScriptedTextBackend(), THRESHOLDS, options) as model:
            for prompt in prompts(60):
                await collect(model, prompt, most_tokens=1)
            await until(lambda: model.statistics().open == 0)
            await until(lambda: model.statistics().audits.pending == 0)
            assert 15 <= model.statistics().audits.texts <= 45

    run(test())


def test_with_exits_off_audits_find_nothing() -> None:
    async def test() -> None:
        options = TextOptions(audit_share=1.0)
        async with GeneratingModel(ScriptedTextBackend(), TokenThresholds.off(3), options) as model:
            for prompt in prompts(10):
                await collect(model, prompt)
            await until(lambda: model.statistics().audits.texts == 10)
            audits = model.statistics().audits
        assert (audits.differing, audits.tokens, audits.edits) == (0, 120, 0.0)

    run(test())


def test_thresholds_are_swapped_for_those_that_begin() -> None:
    async def test() -> None:
        async with GeneratingModel(ScriptedTextBackend(), THRESHOLDS) as model:
            assert {token.stage for token in await collect(model, [1, 2])} != {2}
            model.swap(TokenThresholds.off(3, version=2))
            assert {token.stage for token in await collect(model, [1, 2])} == {2}
            assert model.statistics().thresholds == 2

    run(test())


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match=r"audit_share must be from 0 to 1, got 1\.5"):
        TextOptions(audit_share=1.5)
    with pytest.raises(ValueError, match="batch must be at least 1, got 0"):
        GeneratingModel(ScriptedTextBackend(), THRESHOLDS, TextOptions(batch=0))
    with pytest.raises(ValueError, match="thresholds are for 2 stages"):
        GeneratingModel(ScriptedTextBackend(), TokenThresholds.off(2))


@pytest.mark.parametrize("seed", range(3))
def test_a_storm_of_callers_leaves_nothing_behind(seed: int) -> None:
    """Threads really run side by side here: callers leave at any moment, and steps fail."""

    async def test() -> None:
        draw = random.Random(seed)
        failing = random.Random(seed + 100)

        def on_call(method: str, slots: Sequence[int]) -> None:
            if failing.random() < 0.01:
                raise BackendError("as scripted")

        backend = ScriptedTextBackend(on_call=on_call)
        options = TextOptions(batch=4, queue=40, audit_share=0.2)
        ends: Counter[str] = Counter()

        async def call(model: GeneratingModel, prompt: Tokens, leaves_after: int) -> None:
            tokens: list[int] = []
            stream = model.generate(prompt, most_tokens=12, priority=draw.randrange(3))
            try:
                async with aclosing(stream):
                    async for token in stream:
                        tokens.append(token.token)
                        if len(tokens) == leaves_after:
                            ends["left"] += 1
                            break
                    else:
                        ends["whole"] += 1
            except (BackendError, QueueFullError) as error:
                ends[type(error).__name__] += 1
            reference, _ = backend.reference(prompt, THRESHOLDS, 12, frozenset())
            assert tuple(tokens) == reference[: len(tokens)]

        async with GeneratingModel(backend, THRESHOLDS, options) as model:
            calls = []
            for prompt in prompts(300):
                calls.append(asyncio.create_task(call(model, prompt, draw.choice([0, 0, 1, 5]))))
                if draw.random() < 0.1:
                    draw.choice(calls).cancel()
                await asyncio.sleep(draw.choice([0.0, 0.0, 0.002]))
            results = await asyncio.gather(*calls, return_exceptions=True)
            await until(lambda: model.statistics().open == 0 and not backend.opened)
            statistics = model.statistics()
        wrong = [r for r in results if r is not None and not isinstance(r, asyncio.CancelledError)]
        assert wrong == []
        assert min(ends["left"], ends["whole"]) > 20
        assert (statistics.slots_in_use, statistics.queued) == (0, 0)
        assert statistics.retried > 0
        assert backend.closed

    run(test())
