"""The engine of generating models: requests, results, versions, statistics, and their pages."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offramp.api.engine_options import engine_options
from offramp.api.keywords import ServerKeywords
from offramp.engine.common.errors import (
    BadInputError,
    DeadlineExceededError,
    DrainingError,
    ModelNotServedError,
    OptionsError,
    OutOfServiceError,
    QueueFullError,
)
from offramp.engine.models.options import ModelOptions
from offramp.engine.requests.results import EngineResult, StreamResult
from offramp.engine.serving.totals import totals_of
from offramp.engine.stages.plan import Mode
from offramp.generation.scheduling import TokenThresholds
from offramp.generation.serving.served_text import audit_share, default_length, thresholds_of
from offramp.generation.serving.serving_options import TextServingOptions, text_options
from offramp.generation.serving.text_engine import TextEngine
from offramp.generation.serving.text_status import describe_evidence, text_status
from offramp.server.arguments import parse_arguments
from offramp.server.pages.metrics import render_metrics
from offramp.server.pages.status import render_status
from tests.generation.scripted_backend import ScriptedTextBackend, Tokens
from tests.generation.texts import EVIDENCE, STOP, Letters, engine_with, served_text, text_model

THRESHOLDS = TokenThresholds(version=1, by_stage=(0.7, 0.7))
WAIT_S = 30.0


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, WAIT_S))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what a thread does sets no event here
        await asyncio.sleep(0.001)


def ids(*tokens: int) -> dict[str, Any]:
    return {"input_ids": np.array(tokens, np.int64)}


def text(prompt: str, most: int | None = None) -> dict[str, Any]:
    given: dict[str, Any] = {"text_input": np.array([prompt.encode()], np.object_)}
    return given if most is None else given | {"max_tokens": np.array([most], np.int32)}


def expected(
    prompt: Tokens, most: int = 12, stop: tuple[int, ...] = (STOP,)
) -> tuple[Tokens, list[int]]:
    """Tokens of an answer, and their exits."""
    tokens, depths = ScriptedTextBackend().reference(prompt, THRESHOLDS, most, frozenset(stop))
    return tokens, [-1 if depth == 2 else depth for depth in depths]


def of_letters(tokens: Tokens) -> str:
    return Letters().decode([token for token in tokens if token != STOP])


def test_a_whole_answer_has_an_exit_for_every_token() -> None:
    async def test() -> None:
        engine = await engine_with(ScriptedTextBackend())
        ends = set()
        for prompt in ("b", "cad", "lll", "ab", "ca", "g", "hi"):
            result = await engine.infer("text", text(prompt))
            tokens, exits = expected(tuple(Letters().encode(prompt)))
            assert isinstance(result, EngineResult)
            assert result.outputs["output_ids"].tolist() == list(tokens)
            assert result.outputs["output_ids"].dtype == np.int64
            assert result.outputs["text_output"].tolist() == [of_letters(tokens).encode()]
            assert result.exits.tolist() == exits
            assert all(result.confidences[result.exits == -1] == 1.0)
            assert not result.forced.any() and not result.variants.any()
            ends.add((result.details["offramp_end"], tokens[-1] == STOP))
        assert ends == {("stop", True), ("most_tokens", False)}
        await engine.close()

    run(test())


def test_a_stream_has_a_result_for_every_token() -> None:
    async def test() -> None:
        engine = await engine_with(ScriptedTextBackend())
        results = [r async for r in engine.infer_stream("text", text("ca", 5))]
        tokens, exits = expected((2, 0), 5)
        assert [r.kind for r in results] == ["part"] * (len(tokens) - 1) + ["last"]
        assert [int(r.outputs["output_ids"][0]) for r in results] == list(tokens)
        assert [r.outputs["output_ids"].shape for r in results] == [(1,)] * len(tokens)
        pieces = [r.outputs["text_output"][0].decode() for r in results]
        assert "".join(pieces) == of_letters(tokens)
        assert [int(r.exits[0]) for r in results] == exits
        assert [r.details for r in results[:-1]] == [{}] * (len(tokens) - 1)
        assert results[-1].details.keys() == {"offramp_end"}
        await engine.close()

    run(test())


@pytest.mark.parametrize(
    ("inputs", "letters", "message"),
    [
        ({}, True, r"text: the prompt is missing; send either input_ids: int64 \[prompt\] or"),
        (ids(1) | text("a"), True, "the prompt is input_ids and text_input; send either"),
        (text("a"), False, "there is no input 'text_input'"),
        ({}, False, "input 'input_ids' is missing"),
        ({"input_ids": np.array([1.0])}, True, r"float64 \[1\], expected input_ids: int64"),
        ({"input_ids": np.array([[1]])}, True, r"int64 \[1, 1\], expected input_ids"),
        (text("a", 0), True, "an answer of at most 0"),
        (ids(99), True, "tokens from 99 to 99, expected 0 to 11"),
        (ids(*[1] * 40), True, "send at most 31"),
        ({"text_input": np.array([b"\xff"], np.object_)}, True, "is not UTF-8"),
        ({"text_input": np.array([b""], np.object_)}, True, "'' has no tokens"),
    ],
)
def test_wrong_requests_are_refused(inputs: Any, letters: bool, message: str) -> None:
    async def test() -> None:
        engine = await engine_with(ScriptedTextBackend(), letters=letters)
        with pytest.raises(BadInputError, match=message):
            await engine.infer("text", inputs)
        statistics = engine.statistics()["text"]
        assert (statistics.requests, statistics.samples, statistics.failed) == (0, 0, {})
        await engine.close()

    run(test())


def test_other_names_are_not_served() -> None:
    async def test() -> None:
        engine = await engine_with(ScriptedTextBackend())
        with pytest.raises(ModelNotServedError, match=r"did you mean 'text'"):
            await engine.infer("texts", ids(1))
        with pytest.raises(ModelNotServedError):
            engine.model("other")
        with pytest.raises(OptionsError, match="printable"):
            await engine.load("a\nb", Path("text.ee"))
        await engine.close()

    run(test())


def test_closing_a_stream_frees_the_slot() -> None:
    async def test() -> None:
        engine = await engine_with(ScriptedTextBackend(length=10_000), longest_answer=9_000,
                                   stop_tokens=())  # fmt: skip
        results = engine.infer_stream("text", ids(1))
        async with aclosing(results):
            async for result in results:
                assert result.kind == "part"
                assert found(engine).slots_in_use == 1
                assert engine.statistics()["text"].in_flight == 1
                break
        await until(lambda: found(engine).slots_in_use == 0)
        assert engine.statistics()["text"].failed == {"cancelled": 1}
        await engine.close()

    run(test())


def found(engine: TextEngine) -> Any:
    status = text_status(engine.statistics()["text"])
    assert status is not None
    return status.statistics


def test_deadlines_and_objectives_end_answers() -> None:
    async def test() -> None:
        long: dict[str, Any] = {"longest_answer": 90_000, "stop_tokens": ()}
        engine = await engine_with(
            ScriptedTextBackend(length=100_000), options=ModelOptions(slo_ms=50), **long
        )
        with pytest.raises(DeadlineExceededError):
            await engine.infer("text", ids(1))
        got: list[StreamResult] = []
        with pytest.raises(DeadlineExceededError):
            got += [r async for r in engine.infer_stream("text", ids(1), deadline_s=0.0)]
        assert got == []
        assert engine.statistics()["text"].failed == {"expired": 2}
        await engine.close()

    run(test())


def test_more_than_may_wait_are_refused() -> None:
    async def test() -> None:
        backend = ScriptedTextBackend(slots=1, length=10_000)
        options = ModelOptions(max_queue_samples=1)
        engine = await engine_with(backend, options=options, longest_answer=9_000, stop_tokens=())
        first = engine.infer_stream("text", ids(1))
        await anext(first)
        second = asyncio.ensure_future(anext(engine.infer_stream("text", ids(2))))
        await until(lambda: found(engine).queued == 1)
        assert engine.statistics()["text"].queued == 1
        with pytest.raises(QueueFullError):
            await engine.infer("text", ids(3))
        assert engine.statistics()["text"].failed == {"rejected": 1}
        await first.aclose()
        await second
        await engine.close()

    run(test())


def test_a_replaced_model_answers_what_it_has() -> None:
    async def test() -> None:
        go_on, calls = threading.Event(), []

        def wait(method: str, _slots: Sequence[int]) -> None:
            calls.append(method)
            assert calls.count("run") < 9 or go_on.wait(WAIT_S)

        first = ScriptedTextBackend(length=10_000, on_call=wait)
        engine = await engine_with(first, longest_answer=50, stop_tokens=())
        results = engine.infer_stream("text", text("ca"))
        tokens = [int((await anext(results)).outputs["output_ids"][0])]
        engine.put("text", await served_text(ScriptedTextBackend(), stop_tokens=()).open())
        statistics = engine.statistics()["text"]
        assert statistics.version == 2 and statistics.answered == 0
        assert totals_of(statistics).in_flight == 1
        assert not first.closed
        go_on.set()
        tokens += [int(result.outputs["output_ids"][0]) async for result in results]
        assert tuple(tokens) == expected((2, 0), 50, stop=())[0]
        await until(lambda: first.closed)
        await asyncio.sleep(0)
        await engine.infer("text", text("ca", 2))
        totals = totals_of(engine.statistics()["text"])
        assert (totals.requests, totals.answered) == (2, len(tokens) + 2)
        assert totals.in_flight == totals.queued == 0
        await engine.unload("text")
        with pytest.raises(ModelNotServedError):
            await engine.unload("text")
        assert engine.models() == () and engine.live() and not engine.ready("text")
        await engine.close()

    run(test())


def test_it_leaves_drains_and_closes() -> None:
    async def test() -> None:
        backend = ScriptedTextBackend(length=10_000)
        engine = await engine_with(backend, longest_answer=9_000, stop_tokens=())
        assert engine.ready() and engine.ready("text") and engine.live()
        results = engine.infer_stream("text", ids(1))
        await anext(results)
        engine.leave()
        assert not engine.ready() and engine.live()
        await engine.infer("text", text("ca", 2))
        assert not await engine.drain(0.0)
        with pytest.raises(DrainingError):
            await engine.infer("text", ids(1))
        with pytest.raises(DrainingError):
            await engine.load("more", Path("text.ee"))
        await results.aclose()
        assert await engine.drain(WAIT_S)
        await engine.close()
        assert backend.closed

    run(test())


class BrokenBackend(ScriptedTextBackend):
    """Fails where a backend must not."""

    broken = False

    def statistics(self) -> dict[str, Any]:
        if self.broken:
            raise RuntimeError("broken")
        return {}


def test_a_model_that_broke_is_not_ready() -> None:
    async def test() -> None:
        backend = BrokenBackend()
        engine = await engine_with(backend)
        backend.broken = True
        with suppress(OutOfServiceError):  # it breaks once there is nothing to do
            await engine.infer("text", ids(1))
        await until(lambda: not engine.ready("text"))
        with pytest.raises(OutOfServiceError, match="out of service"):
            await engine.infer("text", ids(1))
        assert not engine.live()
        await engine.close()

    run(test())


def test_audits_are_told_by_statistics_and_pages() -> None:
    async def test() -> None:
        engine = await engine_with(ScriptedTextBackend(), mode=Mode.RELEASE)
        for first in range(12):
            for second in range(4):
                await engine.infer("text", ids(first, second))
        await until(lambda: found(engine).audits.texts == 48)
        statistics = engine.statistics()["text"]
        audits, counts = found(engine).audits, found(engine).counts
        assert 0 < audits.differing < 48
        assert [stage.label for stage in statistics.stages] == ["exit 0", "exit 1", "final"]
        assert [stage.answered for stage in statistics.stages] == list(counts.tokens)
        assert [stage.batch_size.count for stage in statistics.stages] == list(counts.steps)
        assert all(stage.run_s.count for stage in statistics.stages)
        assert statistics.samples == statistics.answered == sum(counts.tokens)
        assert statistics.latency_s.count == statistics.queue_s.count == statistics.requests == 48
        status = text_status(statistics)
        assert status is not None and status.first_token_s.count == 48
        run = sum(n * end for n, end in zip(counts.tokens, (2, 4, 6), strict=True))
        assert status.layers_run == pytest.approx(run / (6 * sum(counts.tokens)))
        metrics = render_metrics(engine).decode()
        for line in (
            'offramp_text_slots{model="text"} 8.0',
            'offramp_text_slots_in_use{model="text"} 0.0',
            f'offramp_text_audits_differing_total{{model="text"}} {float(audits.differing)}',
            'offramp_text_promise_bound_ratio{model="text",risk="tokens"} 0.02',
            f'offramp_answers_total{{exit="exit 0",model="text"}} {float(counts.tokens[0])}',
        ):
            assert line in metrics
        page = render_status(engine)
        assert "Promise:</strong> at most 2 % of tokens differ" in page
        assert "<b>0 of 8</b> slots of 32 tokens in use" in page
        assert f"<b>{100 * audits.differing / 48:.2f} %</b> differ from the full" in page
        await engine.close()

    run(test())


def test_nothing_leaves_early_in_mode_off() -> None:
    async def test() -> None:
        engine = await engine_with(ScriptedTextBackend(), mode=Mode.OFF)
        result = await engine.infer("text", text("ca"))
        assert set(result.exits.tolist()) == {-1}
        info = engine.model("text")
        assert info.policy.active == () and info.promise is None
        assert "Exits are switched off" in render_status(engine)
        await engine.close()

    run(test())


def test_clients_are_told_what_it_takes() -> None:
    async def test() -> None:
        engine = await engine_with(ScriptedTextBackend())
        info = engine.model("text")
        assert info.decoupled and info.max_batch_size == 0
        assert info.optional == {"input_ids", "text_input", "max_tokens"}
        await engine.close()
        engine = await engine_with(ScriptedTextBackend(), letters=False)
        info = engine.model("text")
        assert [spec.name for spec in info.inputs] == ["input_ids", "max_tokens"]
        assert info.optional == {"max_tokens"}
        assert [spec.name for spec in info.outputs] == ["output_ids"]
        await engine.close()

    run(test())


def test_settings_are_options_of_the_engine(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text(
        '[engine]\ntext_slots = 3\n[models.text]\npath = "text.ee"\nmax_batch_size = 2\n'
    )
    arguments = parse_arguments([f"--config={file}", "--text-length=64", "--profile-window-s=9"])
    asked = TextServingOptions(text_slots=3, text_length=64)
    assert text_options(arguments.engine) == asked
    assert arguments.engine.of("text").max_batch_size == 2
    keywords = {"text_slots": 3, "text_length": 64, "profile_window_s": 9.0}
    assert engine_options("serve", keywords, [], ServerKeywords) == replace(
        arguments.engine, models={}
    )
    with pytest.raises(ValueError, match="text_slots is 0, expected 1 to"):
        TextServingOptions(text_slots=0)


def test_options_follow_from_the_model() -> None:
    model = text_model(decay=4.0)
    assert thresholds_of(model, Mode.AUDIT) == TokenThresholds(
        version=1, by_stage=(0.7, 0.7), decay=4.0, most_tokens=12
    )
    assert thresholds_of(model, Mode.OFF).by_stage == (2.0, 2.0)
    options = ModelOptions(audit_budget=0.2)
    shares = [audit_share(model, mode, options) for mode in (Mode.AUDIT, Mode.RELEASE, Mode.LEAVE)]
    assert shares == pytest.approx([0.125, 1.0, 0.0])  # 0.125 / (0.5 + 0.125) is the budget
    assert default_length(model) == 20
    words = describe_evidence(EVIDENCE)
    assert "at most 2 % of tokens" in words and "on 321 prompts (0.5 % observed there)" in words
