"""Loss of savings when measurement noise changes the choice of exits.

    python -m benchmarks.selection_noise BUNDLE [--draws 500] [--json FILE]

The bundle's profile is taken as the truth. Rounds are drawn from it with noise: every run is off by
a lognormal factor on a machine whose speed drifts from round to round, runs randomly take three
times as long, one round is bad for all systems, or one batch size is bad in all rounds. From these
rounds the profile is estimated, exits are chosen on the tuning split and certified on the certify
split, as in compiling. A policy's true savings are computed with the bundle's own profile.

The same rounds are passed to the previous rule (quartiles of each part separately, one cost for all
borders that is cut off at 0, exits dropped while they add more than 10 % at any batch size).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from benchmarks.common import make_parser
from numpy.typing import NDArray

from offramp.bundle import Bundle, Profile
from offramp.bundle.records import CERTIFY, TUNE
from offramp.calibration.choose.selection import Candidates, certified_policy
from offramp.calibration.measure.estimates import backbone_of, heads_of, sets_of_exits, stages_of
from offramp.certify import count_answers, first_exit, savings_of, tuning_path
from offramp.engine.common.timing import Rounds, repeats_of
from offramp.engine.control.costs import CostModel
from offramp.tools.bench.common.output import check_outputs, describe_environment, write_json

FloatArray = NDArray[np.float64]
Draw = Callable[[np.random.Generator, FloatArray], FloatArray]
"""Function from true times [rounds, systems] to measured ones."""

SWEEPS = 6
"""The least that are ever run."""
SIGMA, WANDER = 0.2, 0.3
"""Standard deviations of the lognormal factors of a run, and of the machine in a round."""
SPIKES, SPIKE = 0.05, 3.0
BAD_ROUND = 3.0
BAD_SIZE = 0.15
"""Sigma of the lognormal factor by which each system is off at the bad size, in all rounds."""
EMPTY = 0.02
"""Milliseconds of a graph that does nothing."""
WITHIN = 0.03
OLD_QUANTILE, OLD_OVERHEAD = 0.25, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """The disturbances of a simulated measurement."""

    lognormal: bool = False
    spikes: bool = False
    bad_round: bool = False
    bad_size: bool = False

    def apply(
        self, rng: np.random.Generator, truth_ms: FloatArray, *, bad_size: bool, bad_round: int
    ) -> FloatArray:
        """Disturb float64[rounds, systems]."""
        times = truth_ms.copy()
        if self.lognormal:
            times *= rng.lognormal(0, SIGMA, times.shape)
            times *= rng.lognormal(0, WANDER, (len(times), 1))
        if self.spikes:
            times *= np.where(rng.random(times.shape) < SPIKES, SPIKE, 1.0)
        if self.bad_round:
            times[bad_round % len(times)] *= rng.uniform(1, BAD_ROUND, times.shape[1])
        if self.bad_size and bad_size:
            times *= rng.lognormal(0, BAD_SIZE, times.shape[1])
        return times


KINDS = {
    "lognormal": Noise(lognormal=True),
    "spikes": Noise(spikes=True),
    "bad round": Noise(bad_round=True),
    "bad size": Noise(bad_size=True),
    "all": Noise(lognormal=True, spikes=True, bad_round=True, bad_size=True),
}


@dataclass(frozen=True)
class Case:
    """A bundle as the truth."""

    bundle: Bundle
    max_disagreement: float
    confidence_level: float

    @cached_property
    def profile(self) -> Profile:
        return self.bundle.profile()

    @cached_property
    def after(self) -> list[int]:
        return [exit_.after_segment for exit_ in self.bundle.manifest.exits]

    @cached_property
    def split(self) -> dict[int, tuple[NDArray[np.float32], NDArray[np.bool_]]]:
        records = self.bundle.records()
        agrees = records["prediction"] == records["final_prediction"]
        parts = {part: records["split"] == part for part in (TUNE, CERTIFY)}
        return {part: (records["confidence"][:, rows], agrees[:, rows])
                for part, rows in parts.items()}  # fmt: skip

    @cached_property
    def candidates(self) -> Candidates:
        confidence, agrees = self.split[TUNE]
        return Candidates(
            confidence,
            agrees,
            max_disagreement=self.max_disagreement,
            confidence_level=self.confidence_level,
        )

    @cached_property
    def shipped(self) -> dict[tuple[int, ...], Shipped]:
        """Certified policies by the exits chosen; costs do not matter to certification."""
        return {}

    def costs(self, profile: Profile) -> list[CostModel]:
        """The cost models of a profile, one a batch size."""
        return [CostModel.of(self.bundle.manifest, profile, size) for size in profile.batch_sizes]

    def reference(self, profile: Profile) -> CostModel:
        size = self.bundle.manifest.calibration.reference_batch_size
        return CostModel.of(self.bundle.manifest, profile, size)

    def true_savings(self, active: tuple[int, ...], profile: Profile) -> float:
        """Return the savings, at true times, of the policy for these exits under this profile."""
        if active not in self.shipped:
            self.shipped[active] = self._certified(active)
        policy = self.shipped[active]
        if policy.savings(self.reference(profile)) <= 0:
            return 0.0
        return policy.savings(self.reference(self.profile))

    def _certified(self, active: tuple[int, ...]) -> Shipped:
        tune, certify = self.split[TUNE], self.split[CERTIFY]
        rows = list(active)
        path = tuning_path(tune[0][rows], tune[1][rows]) if rows else np.empty((0, 0))
        policy = certified_policy(
            active,
            path,
            *certify,
            self.reference(self.profile),
            max_disagreement=self.max_disagreement,
            confidence_level=self.confidence_level,
        )
        kept = [a.exit for a in policy.active]
        thresholds = np.array([a.threshold for a in policy.active])
        first = first_exit(certify[0][kept], thresholds) if kept else np.zeros(1, np.int64)
        return Shipped(exits=tuple(kept), counts=count_answers(first, len(kept)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipped:
    """A certified policy's exits, and how many samples of the certify split leave at each."""

    exits: tuple[int, ...]
    counts: NDArray[np.int64]

    def savings(self, cost: CostModel) -> float:
        return float(savings_of(self.counts, cost.latency_ms(self.exits), cost.source_ms))


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnRounds:
    """Rounds by batch size."""

    backbone: list[Rounds]
    heads: list[list[Rounds]]
    """[exits][batch sizes]."""
    stages: list[Rounds]


def draw_rounds(case: Case, noise: Noise, rng: np.random.Generator) -> DrawnRounds:
    """Measure the truth on a disturbed machine."""
    truth, sets = case.profile, sets_of_exits(len(case.after))
    sizes = truth.batch_sizes
    bad, bad_round = int(rng.integers(len(sizes))), int(rng.integers(SWEEPS))
    source = np.array(truth.source_ms)
    segments, heads = np.array(truth.segments_ms), np.array(truth.exits_ms)
    added = heads + np.array(truth.stages_ms)
    served = [source + added[list(set_)].sum(axis=0) for set_ in sets]

    def rounds(systems: Sequence[FloatArray], sweeps: int) -> list[Rounds]:
        result = []
        for column, repeats in enumerate(repeats_of(sizes)):
            row = np.array([system[column] for system in systems])
            seen = noise.apply(rng, np.tile(row, (sweeps * repeats, 1)),
                               bad_size=column == bad, bad_round=bad_round)  # fmt: skip
            result.append(Rounds(times_ms=seen))
        return result

    empty = np.full(len(sizes), EMPTY)
    return DrawnRounds(
        backbone=rounds([source, *segments], SWEEPS),
        heads=[rounds([empty, empty + head], 16) for head in heads],
        stages=rounds([source, *served], SWEEPS),
    )


def estimated(case: Case, seen: DrawnRounds) -> Profile:
    """The profile that compiling makes of rounds."""
    truth, sets = case.profile, sets_of_exits(len(case.after))
    backbone = backbone_of(seen.backbone, truth.batch_sizes)
    exits_ms = [heads_of(of_exit)[0] for of_exit in seen.heads]
    stages = stages_of(seen.stages, truth.batch_sizes, sets, case_bytes(case), exits_ms)
    return Profile(
        device=truth.device,
        threads=truth.threads,
        batch_sizes=truth.batch_sizes,
        source_ms=backbone.source_ms,
        segments_ms=backbone.segments_ms,
        exits_ms=tuple(map(tuple, exits_ms)),
        stages_ms=stages.stages_ms,
    )


def case_bytes(case: Case) -> FloatArray:
    """The part of the true borders that grows with the batch, in place of the bytes that cross."""
    rows = np.array(case.profile.stages_ms)
    sizes = np.array(case.profile.batch_sizes)
    slopes = [max(np.polyfit(sizes, row, 1)[0], 1e-9) for row in rows]
    return np.array(slopes)


def old_profile(case: Case, seen: DrawnRounds) -> Profile:
    """OLD RULE: the quartile of each part over its rounds, borders cut off at 0, equal for all."""

    def typical(rounds: Rounds) -> FloatArray:
        found: FloatArray = np.quantile(rounds.times_ms, OLD_QUANTILE, axis=0)
        return found

    truth = case.profile
    source, segments, borders = [], [], []
    heads = np.array([[max(np.diff(typical(r))[0], 0.0) for r in of_exit]
                      for of_exit in seen.heads])  # fmt: skip
    for column in range(len(truth.batch_sizes)):
        whole, *parts = typical(seen.backbone[column])
        source.append(whole)
        segments.append(np.array(parts) * whole / sum(parts))
        alone, together, *_ = typical(seen.stages[column])
        beyond = max(together - alone - heads[:, column].sum(), 0.0)
        borders.append(beyond / len(case.after))
    return Profile(
        device=truth.device,
        threads=truth.threads,
        batch_sizes=truth.batch_sizes,
        source_ms=tuple(source),
        segments_ms=tuple(map(tuple, np.transpose(segments).tolist())),
        exits_ms=tuple(map(tuple, heads.tolist())),
        stages_ms=(tuple(borders),) * len(case.after),
    )


def old_choice(case: Case, profile: Profile) -> tuple[int, ...]:
    """OLD RULE: drop exits while that helps or they add more than 10 % at any batch size."""
    cost, exits = case.reference(profile), len(case.after)
    everywhere = case.costs(profile)
    known: dict[tuple[int, ...], float] = {}

    def savings(active: tuple[int, ...]) -> float:
        if active not in known:
            known[active] = case.candidates.savings(active, cost)
        return known[active]

    def fits(active: tuple[int, ...]) -> bool:
        return all(c.overhead(active) <= OLD_OVERHEAD for c in everywhere)

    active = tuple(range(exits))
    best = savings(active)
    while active:
        fewer = max((active[:i] + active[i + 1 :] for i in range(len(active))), key=savings)
        if fits(active) and savings(fewer) < best:
            break
        active, best = fewer, savings(fewer)
    while swaps := [s for s in _swapped(active, exits) if fits(s)]:
        swap = max(swaps, key=savings)
        if savings(swap) <= best:
            break
        active, best = swap, savings(swap)
    return active if best > 0 else ()


def _swapped(active: tuple[int, ...], exits: int) -> list[tuple[int, ...]]:
    others = [index for index in range(exits) if index not in active]
    return [tuple(sorted({*active, other} - {index})) for index in active for other in others]


def new_choice(case: Case, profile: Profile) -> tuple[int, ...]:
    """The exits that the compiler chooses."""
    return case.candidates.choose(case.reference(profile))


def measure(case: Case, draws: int) -> dict[str, Any]:
    """Replay the selection under every kind of noise."""
    best = case.true_savings(new_choice(case, case.profile), case.profile)
    quiet = old_choice(case, case.profile)
    result: dict[str, Any] = {
        "noiseless": {
            "new": {"exits": new_choice(case, case.profile), "savings": best},
            "old": {"exits": quiet, "savings": case.true_savings(quiet, case.profile)},
        }
    }  # fmt: skip
    for number, (name, noise) in enumerate(KINDS.items()):
        saved: dict[str, list[float]] = {"new": [], "old": []}
        chosen: dict[str, set[tuple[int, ...]]] = {"new": set(), "old": set()}
        for draw in range(draws):
            seen = draw_rounds(case, noise, np.random.default_rng([number, draw]))
            for rule, profile_of, choice in (
                ("new", estimated, new_choice),
                ("old", old_profile, old_choice),
            ):
                profile = profile_of(case, seen)
                active = choice(case, profile)
                chosen[rule].add(active)
                saved[rule].append(case.true_savings(active, profile))
        result[name] = {
            rule: {**summary(np.array(row), best), "choices": len(chosen[rule])}
            for rule, row in saved.items()
        }
    return result


def summary(saved: FloatArray, best: float) -> dict[str, float]:
    """Return statistics of savings, with the share of draws near the noiseless choice."""
    return {
        "within_3_points": float((saved >= best - WITHIN).mean()),
        "no_exit": float((saved == 0).mean()),
        "mean": float(saved.mean()),
        "first_percentile": float(np.quantile(saved, 0.01)),
        "worst": float(saved.min()),
    }


def main() -> None:
    """Print the table, and write it if asked to."""
    parser = make_parser(__doc__, bundle=True)
    parser.add_argument("--draws", type=int, default=500, help="of each kind of noise")
    parser.add_argument("--max-disagreement", type=float, default=0.01)
    parser.add_argument("--confidence", type=float, default=0.95)
    arguments = parser.parse_args()
    check_outputs(arguments.json)
    case = Case(Bundle.open(arguments.bundle), arguments.max_disagreement, arguments.confidence)
    started_s = time.monotonic()
    result = measure(case, arguments.draws)
    print(f"noiseless: new {result['noiseless']['new']}, old {result['noiseless']['old']}")
    print("noise      rule within 3 points  no exit    mean   1st %  choices")
    for name in KINDS:
        for rule in ("new", "old"):
            row = result[name][rule]
            print(f"{name:<10} {rule:<4} {row['within_3_points']:15.1%} {row['no_exit']:8.1%} "
                  f"{row['mean']:7.3f} {row['first_percentile']:7.3f} "
                  f"{row['choices']:8d}")  # fmt: skip
    print(f"{time.monotonic() - started_s:.0f} s")
    settings = {"draws": arguments.draws, "seeds": "[kind, draw]", "sigma": SIGMA, "wander": WANDER,
                "spikes": [SPIKES, SPIKE], "bad_round": BAD_ROUND, "bad_size": BAD_SIZE,
                "sweeps": SWEEPS, "model": case.bundle.manifest.source.original_name}  # fmt: skip
    write_json(arguments.json, {**result, "environment": describe_environment(**settings)})


if __name__ == "__main__":
    main()
