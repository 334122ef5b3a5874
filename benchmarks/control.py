"""Cost of control while serving: modes compared, the controller on and off.

    python -m benchmarks.control BUNDLE --data TEST.npz [--rounds 5] [--json FILE]

In one process and without the network, at saturation, with one stream (the sender has the other
core): an engine per mode, all open, driven in turn, round after round; every figure is the median
over rounds. First the audited engine is driven until its audits have settled. Savings are of the
stages' seconds per answered sample, relative to the source model's. The last part drives two
engines in audit mode, one of them without a controller: its samples are recorded, and nothing reads
the records.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import uvloop
from benchmarks.common import make_parser
from benchmarks.replay import Replay, altered, single_samples
from numpy.typing import NDArray

from offramp.bundle import Bundle
from offramp.calibration.data.dataset import read_dataset
from offramp.engine.control.evidence_window import REMEMBERED
from offramp.engine.core import Engine
from offramp.engine.models.options import EngineOptions, ModelOptions
from offramp.engine.stages.plan import Mode
from offramp.tools.bench.common.output import describe_environment, wide_console, write_json

MODEL = "model"
CONCURRENCY = 64
SETTLED_S = 2.0
"""Seconds between two checks of whether audits have settled."""


class DrivenEngine:
    """An engine with its load, which runs in turns with other engines."""

    def __init__(self, engine: Engine, samples: Sequence[dict[str, NDArray[Any]]]) -> None:
        self.engine = engine
        self.replay = Replay(engine, MODEL, samples, np.zeros(len(samples), np.int64))
        self.rates: list[float] = []
        self.p99_ms: list[float] = []
        self.p50_ms: list[float] = []
        self.busy_ms: list[float] = []

    async def round(self, duration_s: float) -> None:
        before, answered = self.replay.stages_s(), self.engine.statistics()[MODEL].answered
        took_s = await self.replay.saturate(CONCURRENCY, duration_s)
        answered = self.engine.statistics()[MODEL].answered - answered
        self.rates.append(len(took_s) / (0.9 * duration_s))
        self.p50_ms.append(float(np.quantile(took_s, 0.5)) * 1e3)
        self.p99_ms.append(float(np.quantile(took_s, 0.99)) * 1e3)
        self.busy_ms.append((self.replay.stages_s() - before) / answered * 1e3)

    def figures(self) -> dict[str, Any]:
        statistics = self.engine.statistics()[MODEL]
        control = statistics.control
        return {
            "throughput_rps": float(np.median(self.rates)),
            "p50_ms": float(np.median(self.p50_ms)),
            "p99_ms": float(np.median(self.p99_ms)),
            "busy_ms_per_sample": float(np.median(self.busy_ms)),
            "rounds": {"throughput_rps": self.rates, "p99_ms": self.p99_ms},
            "exit_shares": statistics.exit_shares(),
            "policy": [
                {"exit": a.exit, "threshold": a.threshold}
                for a in self.engine.model(MODEL).policy.active
            ],
            "audit_probability": control.audit_probability if control else None,
            "evidence": control.evidence.value if control else None,
            "disagreement": control.disagreement if control else None,
            "upper_bound": control.disagreement_upper_bound if control else None,
        }


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all measurements of the module's docstring."""
    data = read_dataset(options.data, Bundle.open(options.bundle).manifest.inputs)
    samples = all_different(single_samples(data, options.samples))
    async with AsyncExitStack() as stack:
        systems: dict[str, DrivenEngine] = {}
        for name, mode in (
            ("source", Mode.OFF),
            ("leave", Mode.LEAVE),
            ("audit", Mode.AUDIT),
            ("release", Mode.RELEASE),
            ("audit, unwatched", Mode.AUDIT),
        ):
            engine = await Engine.open(
                {MODEL: options.bundle},
                EngineOptions(
                    mode=mode,
                    streams=1,
                    threads=1,
                    keep_state=False,
                    defaults=ModelOptions(max_batch_size=options.max_batch_size),
                ),
            )
            await stack.enter_async_context(engine)
            systems[name] = DrivenEngine(engine, samples)
        settled_s = 0.0
        for name in ("audit", "audit, unwatched"):
            settled_s = max(settled_s, await settle(systems[name], options.settle_s))
        systems["audit, unwatched"].engine._control.stop()  # noqa: SLF001 - only this asks for it
        for _ in range(options.rounds):
            for system in systems.values():
                await system.round(options.duration_s)
        found = {name: system.figures() for name, system in systems.items()}
    return {
        "measured": True,
        "settled_after_s": settled_s,
        "systems": found,
        **summary(found),
        "environment": describe_environment(
            streams=1,
            threads=1,
            max_batch_size=options.max_batch_size,
            concurrency=CONCURRENCY,
            rounds=options.rounds,
            duration_s=options.duration_s,
        ),
    }


def all_different(samples: Sequence[dict[str, NDArray[Any]]]) -> list[dict[str, NDArray[Any]]]:
    """Repeat samples with small changes, so that no two are equal: copies have no audits."""
    turns = range(REMEMBERED // len(samples) + 2)
    return [altered(sample, turn) for turn in turns for sample in samples]


async def settle(system: DrivenEngine, limit_s: float) -> float:
    """Drive a system until its audit probability is stable; return the seconds needed."""
    taken_s, before = 0.0, -1.0
    while taken_s < limit_s:
        await system.replay.saturate(CONCURRENCY, SETTLED_S)
        taken_s += SETTLED_S
        control = system.engine.statistics()[MODEL].control
        assert control is not None
        if control.evidence == "certified" and control.audit_probability == before:
            break
        before = control.audit_probability
    return taken_s


def summary(found: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return the ratios that summarise the figures."""
    busy = {name: figures["busy_ms_per_sample"] for name, figures in found.items()}
    saved = {name: 1 - value / busy["source"] for name, value in busy.items()}
    watched, unwatched = found["audit"], found["audit, unwatched"]
    return {
        "release_throughput_of_source": found["release"]["throughput_rps"]
        / found["source"]["throughput_rps"],
        "leave_savings": saved["leave"],
        "audit_savings": saved["audit"],
        "savings_kept_by_audit": saved["audit"] / saved["leave"],
        "p99_with_controller": watched["p99_ms"] / unwatched["p99_ms"],
        "p99_with_controller_median_of_ratios": float(
            np.median(
                np.array(watched["rounds"]["p99_ms"]) / np.array(unwatched["rounds"]["p99_ms"])
            )
        ),
        "throughput_with_controller": watched["throughput_rps"] / unwatched["throughput_rps"],
    }


def main() -> None:
    parser = make_parser(__doc__, bundle=True, data=True)
    parser.add_argument(
        "--samples", type=int, default=4096, help="number of samples of the data to use"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--duration-s", type=float, default=3.0, help="seconds of load in each turn of a system"
    )
    parser.add_argument(
        "--settle-s",
        type=float,
        default=120.0,
        help="largest number of seconds until audits have settled",
    )
    parser.add_argument("--max-batch-size", type=int, default=32)
    options = parser.parse_args()
    found = uvloop.run(measure(options))
    console = wide_console()
    for name, figures in found["systems"].items():
        console.print(
            f"{name:18} {figures['throughput_rps']:8.0f}/s  p50 {figures['p50_ms']:6.2f} ms  "
            f"p99 {figures['p99_ms']:6.2f} ms  busy {figures['busy_ms_per_sample']:.3f} ms/sample  "
            f"q {figures['audit_probability']}  {figures['evidence']}"
        )
    for name in summary(found["systems"]):
        console.print(f"{name}: {found[name]:.4f}")
    if options.json is not None:
        write_json(options.json, found)


if __name__ == "__main__":
    main()
