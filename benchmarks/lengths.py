"""Requests of mixed length: padded into shared batches, or only batched with equal lengths.

    python -m benchmarks.lengths [--rounds 5] [--requests 240] [--json FILE]

A BERT of MiniLM's dimensions with random weights (latency does not depend on them), served without
exits, which would only add noise to the comparison. The compiler detects that it may be padded. Two
engines of one stream on all cores, one that pads and one that does not, take turns in every round,
each with the same requests of one sample:

* saturated: a fixed number of requests is in flight, until all are answered;
* lone: one request after the other, which padding must not make slower.

Lengths are drawn from two log-normal distributions, about as long as sentences and as reviews are,
cut off at 128 tokens. Every figure is the median over rounds. CPU time is reported in addition to
wall time, since other processes hardly change it.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from benchmarks.common import make_parser
from numpy.typing import NDArray

from offramp.bundle import Bundle, InputRanges, write_bundle
from offramp.compiler.samples.padding import find_paddings
from offramp.engine.common.environment import available_cores
from offramp.engine.core import Engine
from offramp.engine.models.options import EngineOptions, ModelOptions
from offramp.engine.requests.lengths import STEP
from offramp.engine.stages.plan import Mode
from offramp.tools.bench.common.output import describe_environment, write_json
from offramp.tools.gpu import berts
from offramp.tools.gpu.models import tokens
from offramp.tools.gpu.staged import CutModel, plain_bundle

SIZE = berts.BertSize(layers=6, width=384, heads=12, inner=1536)
"""MiniLM-L6's dimensions."""
MODEL = "bert"
LENGTHS = {"sentences": (20.0, 0.5), "reviews": (80.0, 0.6)}
"""Median length, and the standard deviation of its logarithm."""
SHORTEST = 4
UNDER_WAY = (16,)
LONE_SHARE = 4
"""One of this number of requests is also sent alone."""
SYSTEMS = {"equal": False, "padded": True}

_LONE = ("ms", "cpu_ms")

Sample = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Turn:
    """Results of one system for the requests of a round."""

    per_s: float
    cpu_ms: float
    """CPU time of the whole process per request: other processes hardly change it."""
    mean_batch: float
    added: float
    """Number of positions that padding added, as a share of the requests' own positions."""


def make_bundle(folder: Path) -> Bundle:
    """Return a bundle of the model without exits, with the padding that the compiler detects."""
    path = folder / "model.onnx"
    onnx.save(berts.bert(SIZE, any_length=True), path)
    pieces = CutModel.at(path, ("layer2.out",))
    data = dict(tokens(np.random.default_rng(0), 32, size=SIZE))
    plain = plain_bundle(pieces, folder / "plain.ee", data, exits_after=(), active=())
    manifest, ranges = plain.manifest, InputRanges.of(data)
    threads = available_cores()
    found = find_paddings(pieces.model, manifest, plain.read, data, ranges, threads=threads)
    content = {entry.path: plain.stored(entry.path) for entry in manifest.files}
    padded = replace(manifest, paddings=found)
    return write_bundle(folder / "padded.ee", padded, plain.policy, content)


def make_requests(name: str, count: int) -> list[Sample]:
    """Return requests of one sample, with lengths drawn from a distribution."""
    median, spread = LENGTHS[name]
    rng = np.random.default_rng(1)
    drawn = np.exp(rng.normal(np.log(median), spread, count)).round().astype(int)
    requests = []
    for length in drawn.clip(SHORTEST, SIZE.tokens):
        ids = rng.integers(0, SIZE.vocabulary, (1, length))
        requests.append({berts.IDS: ids, berts.MASK: np.ones_like(ids)})
    return requests


async def saturated(engine: Engine, requests: list[Sample], under_way: int) -> Turn:
    """Answer all requests, ``under_way`` at a time."""
    before = engine.statistics()[MODEL]
    started_s, used_s = time.perf_counter(), time.process_time()
    waiting = iter(requests)

    async def client() -> None:
        for request in waiting:
            await engine.infer(MODEL, request)

    await asyncio.gather(*(client() for _ in range(under_way)))
    took_s, used_s = time.perf_counter() - started_s, time.process_time() - used_s
    after = engine.statistics()[MODEL]
    runs = after.stages[-1].batch_size.count - before.stages[-1].batch_size.count
    positions = sum(request[berts.IDS].size for request in requests)
    added = (after.padded_positions - before.padded_positions) / positions
    cpu_ms = 1e3 * used_s / len(requests)
    return Turn(len(requests) / took_s, cpu_ms, len(requests) / runs, added)


async def lone(engine: Engine, requests: list[Sample]) -> dict[str, float]:
    """Return mean times of requests that are sent one after the other."""
    started_s, used_s = time.perf_counter(), time.process_time()
    for request in requests:
        await engine.infer(MODEL, request)
    took = time.perf_counter() - started_s, time.process_time() - used_s
    return {what: 1e3 * seconds / len(requests) for what, seconds in zip(_LONE, took, strict=True)}


async def measure(bundle: Bundle, requests: list[Sample], rounds: int) -> dict[str, Any]:
    """Measure all systems in turn, round after round; each round begins with another system."""
    engines = {name: await open_engine(bundle, pads=pads) for name, pads in SYSTEMS.items()}
    found: dict[str, Any] = {name: {} for name in SYSTEMS}
    try:
        for number in range(rounds + 1):
            order = list(engines.items())[:: 1 if number % 2 else -1]
            for (name, engine), under_way in itertools.product(order, UNDER_WAY):
                turn = await saturated(engine, requests, under_way)
                if number:  # the first round warms up
                    found[name].setdefault(f"under way {under_way}", []).append(turn)
            for name, engine in order:
                times_ms = await lone(engine, requests[::LONE_SHARE])
                if number:
                    found[name].setdefault("lone", []).append(times_ms)
    finally:
        for engine in engines.values():
            await engine.close()
    return summarise(found)


async def open_engine(bundle: Bundle, *, pads: bool) -> Engine:
    how = ModelOptions(padding=pads, max_batch_size=16)
    options = EngineOptions(
        mode=Mode.OFF, backend="onnxruntime", threads=available_cores(), defaults=how
    )
    return await Engine.open({MODEL: bundle.path}, options)


def summarise(found: dict[str, Any]) -> dict[str, Any]:
    """Return medians over rounds, and medians of the rounds' ratios of padded to equal lengths."""
    figures: dict[str, Any] = {}
    for under_way in UNDER_WAY:
        turns = {name: found[name][f"under way {under_way}"] for name in SYSTEMS}
        pairs = list(zip(turns["padded"], turns["equal"], strict=True))
        figures[f"under way {under_way}"] = {
            name: {
                "requests_per_s": statistics.median(turn.per_s for turn in mine),
                "cpu_ms_per_request": statistics.median(turn.cpu_ms for turn in mine),
                "mean_batch": statistics.median(turn.mean_batch for turn in mine),
                "added_share_of_positions": statistics.median(turn.added for turn in mine),
            }
            for name, mine in turns.items()
        }
        figures[f"under way {under_way}"]["padded_over_equal"] = {
            "requests_per_s": spread([a.per_s / b.per_s for a, b in pairs]),
            "cpu_ms_per_request": spread([a.cpu_ms / b.cpu_ms for a, b in pairs]),
        }
    times = {name: found[name]["lone"] for name in SYSTEMS}
    pairs = list(zip(times["padded"], times["equal"], strict=True))
    figures["lone"] = {
        **{
            name: {what: statistics.median(turn[what] for turn in mine) for what in mine[0]}
            for name, mine in times.items()
        },
        "padded_over_equal": {
            what: spread([a[what] / b[what] for a, b in pairs]) for what in _LONE
        },
    }
    return figures


def spread(ratios: list[float]) -> dict[str, float]:
    return {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--rounds", type=int, default=5, help="number of rounds after a warm-up round"
    )
    parser.add_argument(
        "--requests", type=int, default=240, help="number of requests of each distribution"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bundle = make_bundle(Path(folder))
        (padding,) = bundle.manifest.paddings
        print(padding.describe())
        document = {
            "environment": describe_environment(
                model=f"{SIZE}", rounds=given.rounds, requests=given.requests, step=STEP,
                lengths={name: f"median {m:g}, sigma {s:g}" for name, (m, s) in LENGTHS.items()},
            ),
            "difference": padding.difference,
            "measured": {
                name: asyncio.run(
                    measure(bundle, make_requests(name, given.requests), given.rounds)
                )
                for name in LENGTHS
            },
        }  # fmt: skip
    for name, figures in document["measured"].items():
        for what, values in figures.items():
            print(name, what, values)
    write_json(given.json, document)


if __name__ == "__main__":
    main()
