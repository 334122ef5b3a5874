"""Large messages come in one at a time, and the loop's other work between them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any

import pytest

from offramp.server.requests.receiving import LONG_S, MessageThrottle


async def after(waited: Awaitable[Any], busy_s: float = 0.0) -> Any:
    """Wait, then work for a while: gRPC receives in this way, with a long step after the wait."""
    result = await waited
    until_s = time.monotonic() + busy_s
    while time.monotonic() < until_s:
        pass
    return result


def test_what_is_ready_together_takes_turns_with_the_rest_of_the_loop() -> None:
    async def run(*, in_turns: bool) -> list[str]:
        turns, seen = MessageThrottle(), []
        ready = asyncio.get_running_loop().create_future()

        async def one(name: str) -> None:
            work = after(asyncio.shield(ready), 2 * LONG_S)
            await (turns.take(work) if in_turns else work)
            seen.append(name)

        async def rest() -> None:
            while len(seen) < 20:
                await asyncio.sleep(0)
                if seen and seen[-1] != "rest":
                    seen.append("rest")

        working = [asyncio.create_task(one(str(n))) for n in range(10)]
        await asyncio.sleep(0)
        ready.set_result(None)
        await asyncio.wait_for(rest(), 60)
        await asyncio.gather(*working)
        return seen

    in_turns = asyncio.run(run(in_turns=True))
    assert [name for name in in_turns if name != "rest"] == [str(n) for n in range(10)]
    assert in_turns[1::2] == ["rest"] * 10
    with pytest.raises(TimeoutError):  # without turns they all come before the rest
        asyncio.run(asyncio.wait_for(run(in_turns=False), 0.5))


def test_results_errors_and_steps_that_wait_for_nothing_pass_through() -> None:
    async def failing() -> None:
        await asyncio.sleep(0)
        raise KeyError("x")

    async def at_once() -> int:
        return 3

    async def run() -> None:
        turns = MessageThrottle()
        assert await turns.take(after(asyncio.sleep(0, 5))) == 5
        assert await turns.take(at_once()) == 3
        with pytest.raises(KeyError):
            await turns.take(failing())
        assert await turns.take(after(asyncio.sleep(0, 7))) == 7

    asyncio.run(run())


@pytest.mark.parametrize("where", ["waiting", "in the queue"])
def test_what_is_cancelled_keeps_no_turn(where: str) -> None:
    ends = []

    async def noting(waited: Awaitable[Any]) -> None:
        try:
            await waited
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    async def run() -> None:
        turns = MessageThrottle()
        if where == "in the queue":
            await turns.take(after(asyncio.sleep(0), 20 * LONG_S))
            task = asyncio.create_task(turns.take(noting(asyncio.sleep(0))))  # type: ignore[arg-type]
        else:
            task = asyncio.create_task(turns.take(noting(asyncio.sleep(60))))  # type: ignore[arg-type]
        for _ in range(3):
            await asyncio.sleep(0)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ends == ["cancelled"]
        assert await asyncio.wait_for(turns.take(after(asyncio.sleep(0, 5))), 60) == 5

    asyncio.run(run())
