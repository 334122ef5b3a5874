"""Test of the guarantee while serving, on simulated streams whose true risk is known.

    export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
    python -m benchmarks.guarantee demo/fashion.ee [--streams 200] [--json FILE]

Streams are drawn with replacement from a fixed population, so the true disagreement of every
policy is known: a synthetic one, and recorded answers of a bundle's real model. No model runs;
savings are predicted from profiled times.

* certificate: a certificate's wealth of bets at a risk equal to the constraint, checked after every
  chunk;
* claims: the whole controller without drift; a stream counts as wrong if an active policy was ever
  called certified, or bounded, although its true disagreement is above the limit;
* drift: the disagreement rises suddenly; figures are the audits until the alarm, and the answers
  served until then;
* steady: savings of audit mode compared with those of leave mode;
* observe: time of a call of observe(), by size of the chunk.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from typing import Any

import numpy as np
from benchmarks.common import make_parser
from tests.unit.certify.population import (
    Population,
    feed,
    policy_of,
    synthetic,
    synthetic_costs,
)

from offramp.bundle import Bundle, ExitPolicy
from offramp.certify.betting import Wealth
from offramp.engine.control.certified import CertifiedController, CertifiedSettings
from offramp.engine.control.controller import Evidence
from offramp.engine.control.costs import CostModel
from offramp.tools.bench.common.output import check_outputs, describe_environment, write_json

BOUND = 0.01
CHUNK = 512
BATCH = 32
"""Batch size for which times are taken."""
MOST_AUDITED = 10_000
"""Audited samples after which drift counts as not noticed."""
NEVER = 10**9
"""Placeholder of a number of samples that was not reached."""


def main() -> None:
    parser = make_parser(__doc__, bundle=True)
    parser.add_argument("--streams", type=int, default=200, help="number of streams of each kind")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    check_outputs(arguments.json)
    bundle = Bundle.open(arguments.bundle)
    streams, seed = arguments.streams, arguments.seed
    report = {
        "certificate": [certificate(q, streams=10 * streams, seed=seed) for q in (1.0, 0.05, None)],
        "claims": [
            claims(kind, release=release, streams=streams, seed=seed, bundle=bundle)
            for kind in ("synthetic", "recorded")
            for release in (True, False)
        ],
        "drift": [
            drift(risk, release=release, streams=streams, seed=seed, bundle=bundle)
            for release in (True, False)
            for risk in (0.05, 0.03, 0.02)
        ],
        "steady": steady(bundle, seed=seed),
        "observe": [
            observe_us(release=release, chunk=chunk, seed=seed)
            for release in (True, False)
            for chunk in (64, 512)
        ],
        "environment": describe_environment(
            max_disagreement=BOUND,
            confidence=0.95,
            streams=streams,
            seed=seed,
            chunk=CHUNK,
            kind="simulated; savings predicted from profiled times",
            OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "unset"),
        ),
    }
    show(report)
    write_json(arguments.json, report)


def certificate(q: float | None, *, streams: int, seed: int) -> dict[str, Any]:
    """Simulate wealth at a risk equal to the bound; without q, q changes from chunk to chunk."""
    rng = np.random.default_rng(seed)
    wealth = Wealth(np.full(streams, BOUND))
    audited = 0.0
    while audited < 20_000:
        now = float(rng.choice([1.0, 0.3, 0.02])) if q is None else q
        size = round(200 / now)
        wrong = rng.binomial(size, BOUND * now, size=streams).astype(float)
        wealth.add(size, [(1 / now, wrong)], largest=1 / now)
        audited += size * now
    return {
        "audit_probability": q or "changing",
        "true_risk": BOUND,
        "streams": streams,
        "audited": audited,
        "ever_certified_at_5_percent": float((wealth.highest >= math.log(20)).mean()),
    }


def claims(kind: str, *, release: bool, streams: int, seed: int, bundle: Bundle) -> dict[str, Any]:
    """Simulate the whole controller on streams without drift."""
    if kind == "synthetic":
        population, costs = synthetic(seed, hardness=0.5), synthetic_costs()
        start = policy_of({0: 0.965, 1: 0.96, 2: 0.94}, promised=BOUND)
    else:
        population, costs, start = recorded(bundle)
    settings = CertifiedSettings(release=release)
    samples = 40_000 if release else 150_000
    wrong = certified = alarms = alarms_in_vain = 0
    risks: dict[Any, float] = {}
    ends: list[float] = []
    for stream in range(streams):
        rng = np.random.default_rng([seed, stream])
        policy = start if stream % 2 else policy_of({a.exit: a.threshold for a in start.active})
        records = population.records(rng, tune=3_000, certify=10)
        controller = CertifiedController(policy, costs, records, settings)
        mistaken = ever = False
        risk, seen_alarms = 0.0, 0
        for served, status in feed(controller, population, samples, rng=rng, chunk=CHUNK):
            alarms_in_vain += status.alarms > seen_alarms and risk <= BOUND
            alarms += status.alarms - seen_alarms
            seen_alarms = status.alarms
            key = tuple((a.exit, a.threshold) for a in served.active)
            if key not in risks:
                risks[key] = population.risk(served)
            risk = risks[key]
            claimed = status.evidence is Evidence.CERTIFIED
            ever |= claimed
            mistaken |= claimed and risk > BOUND
            mistaken |= status.disagreement_upper_bound < risk
        wrong += mistaken
        certified += ever
        ends.append(population.risk(controller.policy))
    return {
        "population": kind,
        "mode": mode_of(release=release),
        "streams": streams,
        "samples_each": samples,
        "risk_of_first_policy": population.risk(start),
        "streams_with_a_wrong_claim": wrong,
        "share_wrong": wrong / streams,
        "streams_certified": certified,
        "alarms": alarms,
        "alarms_though_within_the_constraint": alarms_in_vain,
        "median_risk_at_the_end": statistics.median(ends),
    }


def drift(risk: float, *, release: bool, streams: int, seed: int, bundle: Bundle) -> dict[str, Any]:
    """Simulate a sudden rise of wrong early answers; stop after 10,000 audited samples."""
    population, costs, policy = recorded(bundle)
    records = bundle.records()
    drifted = worsened(population, policy, risk, seed=seed)
    settings = CertifiedSettings(release=release)
    chunk = 32 if release else CHUNK
    audits, above, wrong, recovered = [], [], [], []
    risks: dict[Any, float] = {}

    def risk_of(served: ExitPolicy) -> float:
        if served.active not in risks:
            risks[served.active] = drifted.risk(served)
        return risks[served.active]

    for stream in range(streams):
        rng = np.random.default_rng([seed, 1, stream])
        controller = CertifiedController(policy, costs, records, settings)
        feed(controller, population, 3_000 if release else 20_000, rng=rng, chunk=chunk)
        before = controller.status()
        answers = errors = 0.0
        while controller.status().alarms == before.alarms:
            now = risk_of(controller.policy)
            answers += chunk * (now > BOUND)
            errors += chunk * now
            feed(controller, drifted, chunk, rng=rng, chunk=chunk)
            if controller.status().audited - before.audited > MOST_AUDITED:
                break
        after = controller.status()
        audits.append(after.audited - before.audited if after.alarms > before.alarms else NEVER)
        above.append(answers)
        wrong.append(errors)
        since = feed(controller, drifted, 6_000, rng=rng, chunk=chunk)
        first = next((i for i, (_, s) in enumerate(since) if s.evidence == "certified"), None)
        recovered.append(NEVER if first is None else first * chunk)
        above[-1] += chunk * sum(risk_of(served) > BOUND for served, _ in since)
    return {
        "disagreement_before": population.risk(policy),
        "disagreement_after": drifted.risk(policy),
        "mode": mode_of(release=release),
        "streams": streams,
        "alarm_within_600_audited": sum(a <= 600 for a in audits) / streams,
        "alarm_at_all": sum(a < NEVER for a in audits) / streams,
        "median_audited_until_alarm": statistics.median(audits),
        "p95_audited_until_alarm": float(np.quantile(audits, 0.95)),
        "median_answers_above_constraint": statistics.median(above),
        "median_wrong_answers_until_alarm": statistics.median(wrong),
        "share_above_constraint_of_the_100000_answers_after": statistics.fmean(
            min(a, 1e5) for a in above
        )
        / 1e5,
        "median_samples_from_alarm_to_certified_exits": statistics.median(recovered),
    }


def steady(bundle: Bundle, *, seed: int) -> dict[str, Any]:
    """Return savings in the steady state of audit mode, compared with leave mode."""
    population, costs, policy = recorded(bundle)
    rng = np.random.default_rng([seed, 2])
    controller = CertifiedController(policy, costs, bundle.records(), CertifiedSettings())
    used_ms = answered = 0.0
    history = feed(controller, population, 1_000_000, rng=rng, chunk=CHUNK)
    for served, status in history[-len(history) // 4 :]:
        end_ms = float(costs.latency_ms([a.exit for a in served.active])[-1])
        mean_ms = population.mean_ms(served, costs)
        used_ms += mean_ms + status.audit_probability * (end_ms - mean_ms)
        answered += 1
    leave_ms = population.mean_ms(policy, costs)
    leave = 1 - leave_ms / costs.source_ms
    audit = 1 - used_ms / answered / costs.source_ms
    status = controller.status()
    return {
        "kind": "predicted from profiled times",
        "leave_mode_saves": leave,
        "audit_mode_saves": audit,
        "share_kept": audit / leave,
        "audit_probability": status.audit_probability,
        "evidence": status.evidence.value,
        "policy_changes": controller.policy.version - policy.version,
        "true_risk": population.risk(controller.policy),
    }


def observe_us(*, release: bool, chunk: int, seed: int) -> dict[str, Any]:
    """Time calls of ``observe()`` with 13 exits in use and about 60 levels."""
    population, costs = synthetic(seed, exits=13, size=20_000), synthetic_costs(13)
    policy = policy_of(dict.fromkeys(range(13), 0.99), promised=BOUND)
    rng = np.random.default_rng([seed, 3])
    records = population.records(rng, tune=3_000, certify=10)
    controller = CertifiedController(policy, costs, records, CertifiedSettings(release=release))
    took = []
    for _ in range(600):
        rows = rng.integers(population.size, size=chunk)
        q = controller.audit_probability
        seen = population.serve(controller.policy, rows, q=q, rng=rng)
        start = time.perf_counter()
        controller.observe(seen)
        took.append(1e6 * (time.perf_counter() - start))
    return {
        "mode": mode_of(release=release),
        "chunk": chunk,
        "exits": 13,
        "median_us": statistics.median(took),
        "mean_us": statistics.fmean(took),
        "p99_us": float(np.quantile(took, 0.99)),
    }


def recorded(bundle: Bundle) -> tuple[Population, CostModel, ExitPolicy]:
    """Return the bundle's calibration records as a population, with its costs and policy."""
    records = bundle.records()
    population = Population(
        confidence=records["confidence"],
        agrees=records["prediction"] == records["final_prediction"],
    )
    costs = CostModel.of(bundle.manifest, bundle.profile(), BATCH)
    return population, costs, bundle.policy


def worsened(population: Population, policy: ExitPolicy, risk: float, *, seed: int) -> Population:
    """Make exits wrong on a share of samples, drawn at random, so that a policy has this risk."""
    luck = np.random.default_rng([seed, 4]).random(population.size)
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        worse = Population(
            confidence=population.confidence, agrees=population.agrees & (luck >= middle)
        )
        low, high = (middle, high) if worse.risk(policy) < risk else (low, middle)
    return worse


def mode_of(*, release: bool) -> str:
    return "release" if release else "audit"


def show(report: dict[str, Any]) -> None:
    for part in ("certificate", "claims", "drift", "observe"):
        print(part)
        for row in report[part]:
            print("  " + ", ".join(f"{k} {number(v)}" for k, v in row.items()))
    print("steady\n  " + ", ".join(f"{k} {number(v)}" for k, v in report["steady"].items()))


def number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
