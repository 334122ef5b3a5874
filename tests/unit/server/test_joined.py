"""Several engines as one: each model is answered by the engine that opens its kind."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offramp.engine.common.errors import BackendError, DrainingError, ModelNotServedError
from offramp.engine.models.options import EngineOptions, ModelOptions
from offramp.server.common.joined import JoinedEngine
from offramp.server.common.served import ServedEngine
from offramp.testing.engine import FakeEngine, fake_model

SAMPLE = {"x": np.array([[0, 0, 1, 0.95]], np.float32)}


@dataclass
class Opener:
    """Opens paths with a suffix; the engine that it opened."""

    suffix: str
    failure: Exception | None = None
    engine: FakeEngine | None = None
    opened: list[dict[str, Path]] = field(default_factory=list)

    def opens(self, path: Path) -> bool:
        return path.suffix == self.suffix

    async def open_models(self, models: Mapping[str, Path], options: EngineOptions) -> ServedEngine:
        assert isinstance(options, EngineOptions)
        self.opened.append(dict(models))
        if self.failure is not None:
            raise self.failure
        self.engine = FakeEngine(served=tuple(map(fake_model, models)))
        return self.engine


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 30.0))


async def joined(others: Opener, *openers: Opener, **paths: str) -> JoinedEngine:
    models = {name: Path(path) for name, path in paths.items()}
    return await JoinedEngine.open(models, EngineOptions(), openers, others)


def engine_of(opener: Opener) -> FakeEngine:
    assert opener.engine is not None
    return opener.engine


def test_requests_go_to_the_engine_of_the_model() -> None:
    async def test() -> None:
        others, text = Opener(".ee"), Opener(".txt")
        engine = await joined(others, text, a="a.ee", b="b.txt", c="c.onnx")
        assert others.opened == [{"a": Path("a.ee"), "c": Path("c.onnx")}]
        assert text.opened == [{"b": Path("b.txt")}]
        await engine.infer("a", SAMPLE, priority=3)
        await engine.infer("b", SAMPLE, source="me")
        kinds = [result.kind async for result in engine.infer_stream("b", SAMPLE)]
        assert kinds == ["answer"]
        assert [(call.model, call.priority) for call in engine_of(others).calls] == [("a", 3)]
        assert [(c.model, c.source) for c in engine_of(text).calls] == [("b", "me"), ("b", "")]
        assert [model.name for model in engine.models()] == ["a", "c", "b"]
        assert set(engine.statistics()) == {"a", "b", "c"}
        assert engine.model("b").name == "b"
        with pytest.raises(ModelNotServedError, match=r"'d' is served here.*'a', 'b', 'c'"):
            engine.model("d")

    run(test())


def test_readiness_and_life_are_those_of_all() -> None:
    async def test() -> None:
        others, text = Opener(".ee"), Opener(".txt")
        engine = await joined(others, text, b="b.txt")
        assert engine.ready() and engine.ready("b") and not engine.ready("a") and engine.live()
        engine_of(text).unready.add("b")
        assert not engine.ready() and not engine.ready("b")
        engine_of(text).given_up = True
        assert not engine.live()  # the other one has no model

    run(test())


def test_an_engine_is_opened_with_its_first_model() -> None:
    async def test() -> None:
        others, text = Opener(".ee"), Opener(".txt")
        engine = await joined(others, text, a="a.ee")
        assert text.opened == []
        options = ModelOptions(slo_ms=5)
        await asyncio.gather(
            engine.load("b", Path("b.txt"), options=options), engine.load("c", Path("c.txt"))
        )
        assert text.opened == [{}]
        assert engine_of(text).loads == [("b", Path("b.txt"), options), ("c", Path("c.txt"), None)]
        await engine.load("d", Path("d.ee"))
        assert [model.name for model in engine.models()] == ["a", "d", "b", "c"]
        await engine.unload("b")
        assert not engine.ready("b")
        with pytest.raises(ModelNotServedError):
            engine.infer("b", SAMPLE)

    run(test())


def test_a_model_of_another_kind_takes_a_name() -> None:
    async def test() -> None:
        others, text = Opener(".ee"), Opener(".txt")
        engine = await joined(others, text, a="a.ee")
        await engine.load("a", Path("a.txt"))
        assert engine_of(others).models() == ()
        await engine.infer("a", SAMPLE)
        assert len(engine_of(text).calls) == 1
        engine_of(others).load_failure = BackendError("too large")
        with pytest.raises(BackendError):
            await engine.load("a", Path("a.ee"))
        await engine.infer("a", SAMPLE)  # served on
        assert len(engine_of(text).calls) == 2

    run(test())


def test_all_leave_drain_and_close() -> None:
    async def test() -> None:
        others, text, unused = Opener(".ee"), Opener(".txt"), Opener(".none")
        engine = await joined(others, text, unused, a="a.ee", b="b.txt")
        engines = [engine_of(others), engine_of(text)]
        engine.leave()
        engine.flush()
        assert all(each.leaving for each in engines)
        engines[1].waiting = 1
        assert not await engine.drain(0.0)
        assert all(each.draining for each in engines)
        with pytest.raises(DrainingError):
            await engine.load("c", Path("c.none"))
        await engine.close()
        assert all(each.closed for each in engines)

    run(test())


def test_what_was_opened_is_closed_if_another_fails() -> None:
    async def test() -> None:
        others, text = Opener(".ee"), Opener(".txt", failure=BackendError("no memory"))
        with pytest.raises(BackendError, match="no memory"):
            await joined(others, text, a="a.ee", b="b.txt")
        assert engine_of(others).closed

    run(test())
