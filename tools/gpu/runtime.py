"""The parts of the benchmark that measure the runtime: models, pame, parallel and soak."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from offramp.bundle import Bundle
from offramp.tools.gpu import pame, serving
from offramp.tools.gpu.machine import Machine
from offramp.tools.gpu.models import BenchModel, Recorded
from offramp.tools.gpu.pame import BARE, NOBODY_LEAVES

OVERHEAD_GOAL, PYTHON_GOAL_US, SHARE_GOAL, LATENCY_GOAL = 0.05, 60.0, 0.02, 0.6
"""Goals: slowdown if no row leaves; Python's time of a stage in µs; exit check and compaction as a
share of a stage of ResNet-50 at batch 32; mean latency relative to the source model's, at PAME's
settings."""

_LEAST_BATCH: Final = 16
_MOST_ROWS: Final = 16
"""Largest number of rows of a request in the part ``parallel``."""

Save = Callable[[Any], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeOptions:
    """Options of the runtime's benchmark: models, batch sizes, rounds and times."""

    models: tuple[str, ...]
    """Names of the models to measure."""
    folder: Path
    """Folder where bundles are made, and kept."""
    sizes: tuple[int, ...] = (1, 8, 16, 32, 64)
    """Ends of the engines' profiles, rising; PAME's batch sizes are the sizes from 16 on."""
    served: tuple[int, ...] = (8, 32)
    """Largest numbers of rows of a batch in ``parallel``; each is measured."""
    go_on: tuple[float, ...] = (0.2, 0.3, 0.5)
    """Shares of the samples that continue after the first exit."""
    recorded: Path | None = None
    """Confidences of a trained model, instead of shares."""
    rounds: int = 7
    """Number of rounds, over which medians are taken."""
    seed: int = 0
    graphs: bool = True
    """True to capture CUDA graphs."""
    requests: int = 600
    """Number of requests for each system and round of ``parallel``."""
    soak_s: float = 300.0
    """Seconds of the long run."""


class RuntimeBench:
    """Measurements of models on a machine; ``save`` receives the results after every step."""

    def __init__(
        self, machine: Machine, options: RuntimeOptions, models: Mapping[str, BenchModel]
    ) -> None:
        """Measure some of the models."""
        self._machine = machine
        self._options = options
        self._models = {name: models[name] for name in options.models}

    def build(self, save: Save, known: Mapping[str, Any]) -> None:
        """Make bundles of the models, with the files that the backend needs."""
        found = dict(known)
        for name in self._models:
            began = time.perf_counter()
            bundle = self._bundle(name)
            made_s = time.perf_counter() - began
            engines = self._machine.build(bundle.path, self._options.sizes)
            found[name] = {
                "exits_after": [s.output for s in bundle.manifest.segments[:-1]],
                "flops_shares": [s.flops_share for s in bundle.manifest.segments],
                "measured_bundle_s": made_s,
                "measured_build_s": dict(engines),
            }
            save(found)
            print(f"{name}: ready after {time.perf_counter() - began:.1f} s", flush=True)

    def compare(self, save: Save, known: Mapping[str, Any]) -> None:
        """Measure latencies, and the parts of the time."""
        found = dict(known)
        for name, model in self._models.items():
            bundle = self._ready(name)
            settings = self._settings()
            rows = pame.latencies(self._machine, model, bundle, settings)
            found[name] = {**found.get(name, {}), "latencies": rows}
            save(found)
            print("\n".join(latency_lines(name, rows)), flush=True)
            every_size = replace(settings, batches=self._options.sizes)
            cases = pame.breakdown(self._machine, model, bundle, every_size)
            found[name] = {**found[name], "breakdown": cases}
            save(found)
            print("\n".join(breakdown_lines(name, cases)), flush=True)

    def parallel(self, save: Save, known: Mapping[str, Any]) -> None:
        """Measure the throughput of parallel batches."""
        found = dict(known)
        for name, model in self._models.items():
            bundle, rows = self._ready(name), []
            for most in self._options.served:
                settings = serving.ParallelSettings(
                    go_on=self._share(),
                    max_batch_size=most,
                    rounds=self._options.rounds,
                    requests=self._options.requests,
                    graphs=(True, False) if self._options.graphs else (False,),
                    load=serving.Load(seed=self._options.seed, rows=(1, min(most, _MOST_ROWS))),
                )
                rows += serving.parallel(self._machine, model, bundle, settings)
                found[name] = rows
                save(found)
            print("\n".join(parallel_lines(name, rows)), flush=True)

    def soak(self, save: Save, known: Mapping[str, Any]) -> None:
        """Measure a long run of each model."""
        found = dict(known)
        for name, model in self._models.items():
            settings = serving.SoakSettings(
                seconds=self._options.soak_s,
                go_on=self._share(),
                graphs=self._options.graphs,
                load=serving.Load(clients=32, rows=(1, 32), seed=self._options.seed),
            )
            found[name] = serving.soak(self._machine, model, self._ready(name), settings)
            save(found)
            print(soak_line(name, found[name]), flush=True)

    def _bundle(self, name: str) -> Bundle:
        self._options.folder.mkdir(parents=True, exist_ok=True)
        return self._models[name].bundle(self._options.folder, self._options.seed)

    def _ready(self, name: str) -> Bundle:
        bundle = self._bundle(name)
        self._machine.build(bundle.path, self._options.sizes)
        return bundle

    def _share(self) -> float | Recorded:
        """Return one share for parts that do not vary it: the middle of the options."""
        shares = self._shares()
        return shares[len(shares) // 2]

    def _shares(self) -> tuple[float | Recorded, ...]:
        if self._options.recorded is not None:
            return (Recorded.read(self._options.recorded),)
        return self._options.go_on

    def _settings(self) -> pame.Settings:
        return pame.Settings(
            batches=self._batches(),
            go_on=self._shares(),
            rounds=self._options.rounds,
            graphs=self._options.graphs,
            seed=self._options.seed,
        )

    def _batches(self) -> tuple[int, ...]:
        """Return PAME's sizes among those with engines; small sizes are for later stages."""
        return tuple(size for size in self._options.sizes if size >= _LEAST_BATCH)


def latency_lines(name: str, rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield mean and tail latency, as ratios to the source model's."""
    cases: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for row in rows:
        cases.setdefault((row["go_on_replayed"], row["batch_size"]), {})[row["system"]] = row
    for (share, size), systems in cases.items():
        source, ours = systems["source"], systems["offramp"]
        nobody = systems["offramp-no-exit"]["mean_ms"] / source["mean_ms"] - 1
        bare = f"bare {systems[BARE]['mean_ms']:.3f}, " if BARE in systems else ""
        yield (
            f"{name} batch {size}, {share} go on: ms {bare}source {source['mean_ms']:.3f}, stages "
            f"mean {ours['mean_ms']:.3f} (×{ours['mean_ms'] / source['mean_ms']:.2f}, goal "
            f"×{LATENCY_GOAL}), p99 ×{ours['p99_ms'] / source['p99_ms']:.2f} (goal ×1); nobody "
            f"leaves {nobody:+.1%} (goal +{OVERHEAD_GOAL:.0%})"
        )


def breakdown_lines(name: str, cases: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the parts of a batch's time, if no row leaves."""
    for case in cases:
        if case["case"] != NOBODY_LEAVES:
            continue
        for index, stage in enumerate(case["stages"]):
            parts = ", ".join(f"{p} {ms:.3f}" for p, ms in stage["measured_parts_ms"].items())
            yield (
                f"{name} batch {case['batch']} stage {index}: ms {parts}; stage end "
                f"{stage['stage_end_share']:.1%} (goal {SHARE_GOAL:.0%}), Python "
                f"{stage['python_us']:.0f} µs (goal {PYTHON_GOAL_US:.0f})"
            )


def parallel_lines(name: str, rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the throughput for each τ_b."""
    for row in rows:
        limit = "" if row["parallel_below"] is None else f", τ_b {row['parallel_below']}"
        graphs = "graphs" if row["graphs"] else "no graphs"
        yield (
            f"{name} ≤ {row['max_batch_size']} {row['system']}{limit}, {graphs}: "
            f"{row['samples_per_s']:.0f} samples/s, mean {row['mean_ms']:.2f} ms, p99 "
            f"{row['p99_ms']:.2f} ms, {row['failed']} failed"
        )


def soak_line(name: str, found: dict[str, Any]) -> str:
    """Return a line with the result of a long run."""
    growth = found["growth_bytes"] / 2**20
    return (
        f"{name}: {found['answered']} of {found['sent']} requests answered in "
        f"{found['measured_s']:.0f} s, {found['lost']} lost; device memory "
        f"{'flat' if found['flat'] else 'GROWS'} ({growth:+.1f} MiB)"
    )


def held(soak: Mapping[str, Any]) -> bool:
    """Return True if every long run had flat memory and lost no request."""
    return all(
        run["flat"] and run["sent"] == run["answered"] and run["drained"] for run in soak.values()
    )
