"""Requests of mixed length to a real model over gRPC: answered as alone, the hostile ones apart."""

from __future__ import annotations

import asyncio
import logging

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.facts import tells
from tests.loopback import MODEL, ask, check, serving
from tests.padded import Arrays, padded_bundle, sentences
from tests.sliced import sliced
from tests.unit.engine.serving import until

from offramp.bundle import Bundle, LengthRange
from offramp.certify import MODEL_END
from offramp.client import InvalidInputError, ServerError
from offramp.engine.requests.statistics import ModelStatistics
from offramp.engine.scheduling.policies import PolicyName
from offramp.engine.stages.plan import Mode

THRESHOLD, SHORTEST, LONGEST, TABLE = 0.97, 3, 24, 64


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Three exits, with a first token, a mean and attention; calibrated on 3 to 24 tokens."""
    data = sentences(60, LONGEST, shortest=SHORTEST)
    seen = LengthRange(size="sequence", mask="attention_mask", shortest=SHORTEST, longest=LONGEST)
    folder = tmp_path_factory.mktemp("padded")
    made = padded_bundle(sliced("bert"), folder, data, threshold=THRESHOLD, lengths=(seen,))
    assert made.manifest.paddings
    return made


def sentence(rng: np.random.Generator, length: int, rows: int = 1) -> Arrays:
    ids = rng.integers(1, 50, (rows, length))
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def ran(statistics: ModelStatistics) -> int:
    """Runs of the first stage."""
    return statistics.stages[0].batch_size.count


@pytest.mark.parametrize("policy", ["run-through", "refill", "rebatch", "delay", "slackfit"])
def test_mixed_lengths_are_answered_as_alone(bundle: Bundle, policy: str) -> None:
    async def body() -> None:
        rng = np.random.default_rng(0)
        lengths = rng.integers(SHORTEST, LONGEST + 1, 80)
        requests = [sentence(rng, int(n), 1 + i % 3) for i, n in enumerate(lengths)]
        async with serving(bundle, scheduling=PolicyName(policy)) as (engine, client):
            results = await ask(client, requests)
            found = engine.statistics()[MODEL]
        for inputs, result in zip(requests, results, strict=True):
            check(bundle, inputs, result)
        places = np.concatenate([result.exits for result in results])
        assert {MODEL_END, 0} <= set(places.tolist())
        assert 0 < found.padded <= found.padded_positions <= 7 * found.padded
        assert found.answered == found.samples == sum(len(r["input_ids"]) for r in requests)
        assert found.unseen_lengths == found.retried == 0

    asyncio.run(body())


def test_padding_can_be_switched_off(bundle: Bundle) -> None:
    async def runs(*, padding: bool) -> tuple[int, int]:
        rng = np.random.default_rng(0)
        requests = [sentence(rng, length) for length in range(17, 25)]
        # One waits for the others: nothing is started before all are there.
        how = {"max_batch_size": 8, "max_queue_delay_ms": 2000.0, "padding": padding}
        async with serving(bundle, **how) as (engine, client):
            for inputs, result in zip(requests, await ask(client, requests), strict=True):
                check(bundle, inputs, result)
            found = engine.statistics()[MODEL]
        return ran(found), found.padded_positions

    assert asyncio.run(runs(padding=True)) == (1, sum(range(8)))
    assert asyncio.run(runs(padding=False)) == (8, 0)


def test_a_bad_request_fails_alone(bundle: Bundle) -> None:
    """Other requests of its batch, of the same bucket, get their answers."""

    async def body() -> None:
        rng = np.random.default_rng(1)
        requests = [sentence(rng, length) for length in (*range(9, 17), *range(57, 65))]
        unknown, hidden = sentence(rng, 12), sentence(rng, 12)
        unknown["input_ids"][0, 3] = 50
        hidden["attention_mask"][:] = 0
        async with serving(bundle) as (_, client):

            async def fails(inputs: Arrays, kind: type[Exception], said: str) -> None:
                with pytest.raises(kind, match=said):
                    await client.infer(MODEL, inputs)

            results, wholly_masked, *_ = await asyncio.gather(
                ask(client, requests),
                client.infer(MODEL, hidden),
                fails(sentence(rng, 0), InvalidInputError, r"dimension 1 \(sequence\) is empty"),
                fails(
                    sentence(rng, TABLE + 1),
                    InvalidInputError,
                    "sequence is 65 in input 'attention_mask', and the model fails beyond 64",
                ),
                fails(unknown, ServerError, "indices element out of data bounds, idx=50"),
            )
        for inputs, result in zip(requests, results, strict=True):
            check(bundle, inputs, result)
        check(bundle, hidden, wholly_masked)

    asyncio.run(body())


LENGTHS = (2, 3, 24, 25, 40)


@pytest.mark.parametrize("mode", [Mode.AUDIT, Mode.LEAVE])
def test_lengths_that_calibration_never_had_are_told(
    bundle: Bundle, mode: Mode, caplog: pytest.LogCaptureFixture
) -> None:
    """If answers are observed, no exit answers them; otherwise they are only counted."""

    async def body() -> tuple[list[NDArray[np.int32]], ModelStatistics]:
        rng = np.random.default_rng(2)
        requests = [sentence(rng, length, 20) for length in LENGTHS]
        async with serving(bundle, mode) as (engine, client):
            results = await ask(client, requests)
            if mode is Mode.AUDIT:
                await until(lambda: engine.statistics()[MODEL].out_of_range == 60)
            found = engine.statistics()[MODEL]
        for inputs, result, length in zip(requests, results, LENGTHS, strict=True):
            if mode is Mode.LEAVE or SHORTEST <= length <= LONGEST:
                check(bundle, inputs, result)
        return [result.exits for result in results], found

    with caplog.at_level(logging.WARNING, "offramp.engine.requests.lengths"):
        exits, found = asyncio.run(body())
    assert found.unseen_lengths == 60
    told = [
        record.getMessage() for record in caplog.records if "calibration samples had" in record.msg
    ]
    assert len(told) == 1
    tells(told[0], "3 to 24", "does not cover")
    early = [bool((places != MODEL_END).any()) for places in exits]
    assert early == ([False, True, True, False, False] if mode is Mode.AUDIT else [True] * 5)
