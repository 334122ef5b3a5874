"""The benchmark of generated text measures what it says: shorter decoders, risks, random splits."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.generation_runs import (
    TextSetup,
    TextSystem,
    first_layers,
    run_loop,
    timed_graphs,
)
from benchmarks.generation_splits import count_splits

from offramp.generation.graphs.text_graphs import cut_export
from offramp.generation.promise.text_promise import TextLosses, TextPromise, TextRisk
from offramp.generation.scheduling import RefillPolicy, TogetherPolicy, TokenThresholds
from tests.text_loops import PlainModel
from tests.text_models import (
    LAYERS,
    START,
    VOCABULARY,
    backend_of,
    cut_at,
    drawn_prompts,
    exported,
    graphs_of,
    write,
)

MOST = 6


def setup_of(path: Path, count: int) -> TextSetup:
    prompts = drawn_prompts(count, seed=4)
    return TextSetup(
        model=path, layers=LAYERS, prompts=prompts, pool=prompts, most_tokens=MOST,
        start_token=START, stop=frozenset({3}), threads=1,
    )  # fmt: skip


@pytest.mark.parametrize("encodes", [False, True])
def test_the_first_layers_are_those_of_the_model(encodes: bool, tmp_path: Path) -> None:
    """The result equals that of all tokens leaving there."""
    path = write(exported(encodes=encodes), tmp_path)
    setup = setup_of(path, 20)
    short = cut_export(first_layers(path, 2), (), start_token=START)
    assert len(short.model.layers) == 2
    off, at_once = TokenThresholds.off(1), TokenThresholds(version=0, by_stage=(0.0,))
    systems = [
        TextSystem(name="short", backend=backend_of(short), thresholds=off),
        TextSystem(name="cut", backend=backend_of(cut_at(path, (2,))), thresholds=at_once),
    ]
    runs = [run_loop(s, setup, setup.prompts, in_flight=4, batch=4) for s in systems]
    assert runs[0].texts == runs[1].texts
    assert len({tuple(text) for text in runs[0].texts}) > 3
    assert [run.layers_run for run in runs] == [2, 2]


@pytest.mark.parametrize("policy", [RefillPolicy(), TogetherPolicy()])
def test_a_closed_loop_gives_the_models_answers(policy: Any, tmp_path: Path) -> None:
    path = write(exported(), tmp_path)
    setup, plain = setup_of(path, 30), PlainModel(path)
    system = TextSystem(
        name="whole", backend=backend_of(graphs_of()), thresholds=TokenThresholds.off(3),
        policy=policy,
    )  # fmt: skip
    run = run_loop(system, setup, setup.prompts, in_flight=5, batch=3)
    for prompt, text in zip(setup.prompts, run.texts, strict=True):
        told = plain.greedy(prompt, MOST)
        end = told.index(3) + 1 if 3 in told else MOST
        assert text == told[:end]
    assert run.layers_run == LAYERS
    assert 1 < run.rows_of_a_step <= 3
    assert run.tokens == sum(map(len, run.texts))


def test_the_time_of_a_step_is_taken_apart(tmp_path: Path) -> None:
    setup = setup_of(write(exported(encodes=True), tmp_path), 6)
    with timed_graphs() as times:
        backend = backend_of(graphs_of(encodes=True))
        exits = TokenThresholds(version=0, by_stage=(0.3, 0.3))
        system = TextSystem(name="exits", backend=backend, thresholds=exits)
        run = run_loop(system, setup, setup.prompts, in_flight=4, batch=4)
    shares = times.shares(run.seconds)
    assert set(shares) == {*times.KINDS, "python"}
    assert all(share > 0 for share in shares.values()), shares
    assert sum(shares.values()) == pytest.approx(1)


def losses(rate: float, prompts: int, *, seed: int) -> TextLosses:
    wrong = np.random.default_rng(seed).random(prompts) < rate
    return TextLosses(losses=wrong.astype(np.float64), tokens=np.full(prompts, 10))


@pytest.mark.parametrize("risk", list(TextRisk))
def test_few_splits_break_a_promise_that_is_certified(risk: TextRisk) -> None:
    scale = 1.0 if risk is TextRisk.TEXTS else 10.0  # of ten tokens of an answer one is wrong
    promise = TextPromise(risk=risk, bound=0.02, most_tokens=10, binary=True)
    rates = [scale * rate for rate in (0.001, 0.005, 0.01, 0.019, 0.021, 0.03, 0.06)]
    levels = [losses(rate, 4000, seed=n) for n, rate in enumerate(rates)]
    counts = count_splits(levels, promise, splits=200)
    assert counts.certified == 200
    assert counts.failing <= 0.05
    assert counts.above_in_pool == sum(counts.levels[4:]) <= 10  # levels with rates above the bound
    assert sum(counts.levels[2:4]) > 100, counts  # it is not kept by certifying next to nothing


def test_a_promise_that_is_broken_is_seen() -> None:
    """Splits whose testing half is worse than the certifying half are counted."""
    promise = TextPromise(risk=TextRisk.TEXTS, bound=0.02, confidence_level=0.51, binary=True)
    counts = count_splits([losses(0.02, 600, seed=1)], promise, splits=200)
    assert 0 < counts.above_on_test <= counts.certified < 200
    assert Counter(counts.levels) == {counts.certified: 1}


def test_nothing_is_certified_of_too_few_prompts() -> None:
    promise = TextPromise(risk=TextRisk.TEXTS, bound=0.01, binary=True)
    counts = count_splits([losses(0.0, 100, seed=0)], promise, splits=10)
    assert (counts.certified, counts.above_on_test, counts.failing) == (0, 0, 0.0)


def test_a_number_of_layers_that_there_is_not_is_refused(tmp_path: Path) -> None:
    path = write(exported(), tmp_path)
    with pytest.raises(ValueError, match="9 layers are to be left, and the decoder has 4"):
        first_layers(path, 9)
    assert cut_export(first_layers(path, 1), ()).model.vocabulary == VOCABULARY
