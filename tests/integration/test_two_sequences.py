"""A model with two symbolic sizes, each with its mask: compiled end to end, and served."""

from __future__ import annotations

import asyncio
import dataclasses
import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from tests import models
from tests.bundles import compile_tiny
from tests.loopback import MODEL, ask, check, serving
from tests.padded import Arrays, answers, sentences

from offramp.bundle import ActiveExit, Bundle, LengthRange, write_bundle
from offramp.calibration.measure import profiling
from offramp.certify import MODEL_END
from offramp.compiler.commands.printing import print_bundle

SAMPLES, FIRST, SECOND = 1400, 12, 7


def pairs(samples: int, first: int, second: int, *, seed: int = 0) -> Arrays:
    """Return sentences, and second ones of another length; both padded."""
    others = sentences(samples, second, seed=seed + 1)
    return {
        **sentences(samples, first, seed=seed),
        "context_ids": others["input_ids"],
        "context_mask": others["attention_mask"],
    }


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Return a bundle; every timed run takes 1 ms, so that all exits are built on any machine."""
    folder = tmp_path_factory.mktemp("two")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(profiling.TimedGraph, "time_ms", lambda _self, _tensors: 1.0)
        patched.setattr(profiling, "_staged_ms", lambda *_: 1.0)
        patched.setattr(profiling, "disturbances", lambda *_: ())
        data = pairs(SAMPLES, FIRST, SECOND)
        bundle = compile_tiny(models.two_sequences(), data, folder, candidates=3)
    return Bundle.open(bundle.path)


def test_each_size_is_padded_by_its_own_mask(compiled: Bundle) -> None:
    found = [(p.size, p.mask, p.longest) for p in compiled.manifest.paddings]
    assert found == [
        ("sequence", "attention_mask", 4 * FIRST),
        ("context", "context_mask", 4 * SECOND),
    ]
    ranges = compiled.input_ranges()
    assert ranges is not None
    assert ranges.lengths == (
        LengthRange(size="sequence", mask="attention_mask", shortest=2, longest=FIRST),
        LengthRange(size="context", mask="context_mask", shortest=2, longest=SECOND),
    )
    told = f"samples of different `context` are padded into one batch, up to {4 * SECOND}"
    printed = io.StringIO()
    print_bundle(compiled, Console(file=printed))
    assert f"While serving {told}" in printed.getvalue()
    assert told in compiled.read("report.html").decode()


def with_all_exits(bundle: Bundle, path: Path) -> Bundle:
    """Return the bundle with a policy by which a quarter may leave at every exit."""
    said = answers(bundle, pairs(200, FIRST, SECOND, seed=7))
    active = tuple(
        ActiveExit(exit=e.index, threshold=float(np.quantile(said[e.confidence], 0.75)))
        for e in bundle.manifest.exits
    )
    content = {e.path: bundle.read(e.path) for e in bundle.manifest.files}
    policy = dataclasses.replace(bundle.policy, active=active, promise=None)
    return write_bundle(path, bundle.manifest, policy, content)


def test_both_lengths_may_differ_between_requests(compiled: Bundle, tmp_path: Path) -> None:
    bundle = with_all_exits(compiled, tmp_path / "all.ee")

    async def body() -> None:
        rng = np.random.default_rng(0)
        requests = []
        for number in range(60):
            first, second = int(rng.integers(2, 30)), int(rng.integers(2, 20))
            asked = pairs(2, first, second, seed=number)
            requests.append({name: array[: 1 + number % 2] for name, array in asked.items()})
        async with serving(bundle) as (engine, client):
            results = await ask(client, requests)
            found = engine.statistics()[MODEL]
        for inputs, result in zip(requests, results, strict=True):
            check(bundle, inputs, result)
        assert found.padded > 0 == found.retried
        assert found.unseen_lengths > 0
        places = set(np.concatenate([result.exits for result in results]).tolist())
        assert {MODEL_END, 0} <= places

    asyncio.run(body())
