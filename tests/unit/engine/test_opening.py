"""An engine that is not wanted any more while it loads."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.engines import engine_bundle
from tests.unit.engine.serving import LIMIT_S

from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend
from offramp.engine.common.errors import BackendError, OptionsError
from offramp.engine.core import Engine
from offramp.engine.models.options import EngineOptions
from offramp.engine.serving import opening as opening_of
from offramp.engine.stages.plan import Mode, StageSpec


def test_cancelling_waits_for_the_loading_thread_and_keeps_its_own_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    path = engine_bundle("mlp", tmp_path / "m.ee").path
    loading, go_on = threading.Event(), threading.Event()
    happened: list[str] = []

    class Slow(OnnxRuntimeBackend):
        def prepare(self, spec: StageSpec) -> Any:
            loading.set()
            assert go_on.wait(LIMIT_S)
            stage = super().prepare(spec)
            happened.append("prepared")
            return stage

        def close(self) -> None:
            happened.append("closed")
            raise BackendError("1 slots are still open")

    monkeypatch.setattr(opening_of, "make_backend", lambda *_, **__: Slow())

    async def body() -> None:
        opening = asyncio.create_task(Engine.open({"m": path}, EngineOptions(mode=Mode.OFF)))
        assert await asyncio.to_thread(loading.wait, LIMIT_S)
        opening.cancel()
        await asyncio.sleep(0)
        assert not opening.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await opening

    asyncio.run(asyncio.wait_for(body(), LIMIT_S))
    assert happened == ["prepared", "closed"]
    assert "1 slots are still open" in caplog.text


@pytest.mark.parametrize("name", ["", "m\udcff", "two\nlines", "\x07"])
def test_a_name_that_no_client_can_ask_for_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(OptionsError, match=r"expected printable Unicode.*--model NAME=PATH"):
        asyncio.run(Engine.open({name: tmp_path}, EngineOptions(mode=Mode.OFF)))
