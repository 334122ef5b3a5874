"""Delay until the controller notices drift, and the cost of its audits without drift.

    export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
    python -m benchmarks.drift demo/fashion.ee [--streams 200] [--baseline 20] [--json FILE]

Simulated: streams are drawn with replacement from the records of a bundle's real model, so that the
true disagreement is known; no model runs. Controllers are those that serve in audit mode. Some have
a constant share of audits (``constant``, the baseline); the audits of others increase with
suspicion (``rising``). All streams start without drift. Inputs look the same in all drifts: only
audits can detect them, and the guard of the inputs is not used.

* abrupt: exits suddenly err on an additional fixed share of the samples;
* slow: the same, but the share grows over 20,000 samples;
* periodic: the same as abrupt, in turns for 5,000 samples and off for 5,000;
* label skew: classes on which exits err become more frequent, as far as the records allow;
* adversarial: errors occur only while exits answer, and only at the answering exits.

A delay is the number of answers from the first affected one to the alarm. ``quiet`` is the cost of
audits and the rate of false alarms; ``false_alarms`` is the drift alarm alone, with a rate so high
that false alarms can be counted; ``limits`` is the bound that no rule with the same rate can beat.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from benchmarks.common import make_parser
from benchmarks.guarantee import BATCH, recorded
from tests.unit.certify.population import Population

from offramp.bundle import Bundle, ExitPolicy
from offramp.certify import MODEL_END
from offramp.engine.control.adjustment import ExitProposals
from offramp.engine.control.certified import CertifiedController, CertifiedSettings
from offramp.engine.control.controller import Evidence
from offramp.engine.control.costs import CostModel
from offramp.engine.control.drift import DEFAULT_RATE, DriftAlarm, Suspicion
from offramp.engine.control.shift import ShiftGuard
from offramp.tools.bench.common.output import check_outputs, describe_environment, write_json

BOUND: Final = 0.01
CHUNK: Final = 200  # samples from one look of the controller to the next
BEFORE: Final = 10_000  # samples without drift
MOST: Final = 40_000
"""Samples after which drift counts as not noticed."""
RAMP: Final = 20_000
PERIOD: Final = 10_000
QUIET: Final = 100_000
SCENARIOS: Final = ("adversarial", "abrupt", "slow", "periodic")
CASES: Final = (
    *((scenario, added) for scenario in SCENARIOS for added in (0.02, 0.05)),
    ("label skew", 0.02),
)
LIMITS: Final = (0.02, 0.027, 0.057)
"""Risks for which the best delay is computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftStream:
    """The data from which a process draws a stream."""

    bundle: Path
    rising: bool
    seed: int

    def begin(self, *, guarded: bool) -> RunningStream:
        bundle = Bundle.open(self.bundle)
        population, costs, policy = recorded(bundle)
        settings = CertifiedSettings(max_disagreement=BOUND, raise_audits=self.rising)
        records = bundle.records()
        controller = CertifiedController(
            policy,
            costs,
            records,
            settings,
            guard=ShiftGuard(records["confidence"]) if guarded else None,
            proposals=ExitProposals(costs, max_overhead=0.1),
        )
        return RunningStream(
            population=population,
            classes=records["final_prediction"],
            costs=costs,
            controller=controller,
            rng=np.random.default_rng([self.seed, 5]),
        )


@dataclass(slots=True, kw_only=True)
class RunningStream:
    """A stream, its controller, and the true risk of its policies."""

    population: Population
    classes: Any
    """[samples]: the source model's answers."""
    costs: CostModel
    controller: CertifiedController
    rng: np.random.Generator
    facts: dict[ExitPolicy, tuple[float, float, float]] = field(default_factory=dict)

    def facts_of(self, policy: ExitPolicy) -> tuple[float, float, float]:
        """Return a policy's share of early answers, and mean times to the answer and the end."""
        if policy not in self.facts:
            early = (self.population.answered_at(policy, slice(None)) != MODEL_END).mean()
            end_ms = self.costs.latency_ms([a.exit for a in policy.active])[-1]
            mean_ms = self.population.mean_ms(policy, self.costs)
            self.facts[policy] = float(early), mean_ms, float(end_ms)
        return self.facts[policy]

    def step(self, *, added: float = 0.0, weight: Any = None, only_answers: bool = False) -> None:
        """Serve a chunk and pass it to the controller; jobs run immediately."""
        policy, q = self.controller.policy, self.controller.audit_probability
        rows = self.rng.choice(self.population.size, size=CHUNK, p=weight)
        agrees = self.population.agrees[:, rows].copy()
        first = self.population.answered_at(policy, rows)
        # a disagreement shows where an exit answers, as nearly all do in the first policy
        hit = self.rng.random(CHUNK) < added / max(self.facts_of(policy)[0], 0.5)
        if only_answers:
            hit &= first != MODEL_END
            agrees[first[hit], np.flatnonzero(hit)] = False
        else:
            agrees[:, hit] = False
        drawn = Population(confidence=self.population.confidence[:, rows], agrees=agrees)
        self.controller.observe(drawn.serve(policy, np.arange(CHUNK), q=q, rng=self.rng))
        if (job := self.controller.take_job()) is not None:
            self.controller.finish(job, job.run())


def main() -> None:
    parser = make_parser(__doc__, bundle=True)
    parser.add_argument(
        "--streams", type=int, default=200, help="number of streams of each kind of drift"
    )
    parser.add_argument(
        "--baseline", type=int, default=20, help="number of streams with constant audits"
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    check_outputs(arguments.json)
    with ProcessPoolExecutor(arguments.processes) as pool:
        report = measure(arguments, pool)
    report["environment"] = describe_environment(
        max_disagreement=BOUND,
        streams=arguments.streams,
        baseline=arguments.baseline,
        seed=arguments.seed,
        chunk=CHUNK,
        batch_size=BATCH,
        kind="simulated; compute predicted from profiled times",
        OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "unset"),
    )
    write_json(arguments.json, report)


def measure(asked: argparse.Namespace, pool: ProcessPoolExecutor) -> dict[str, Any]:
    def streams(count: int, *, rising: bool) -> list[DriftStream]:
        first = asked.seed * asked.streams
        return [
            DriftStream(bundle=asked.bundle, rising=rising, seed=first + number)
            for number in range(count)
        ]

    limits = [shown(row) for row in pool.map(limit, LIMITS)]
    rising, constant = (streams(n, rising=r) for n, r in ((asked.streams, 1), (asked.baseline, 0)))
    kinds = {"rising": rising, "constant": constant}
    drift: list[dict[str, Any]] = []
    for name, given in kinds.items():
        found = list(pool.map(run_all, given))
        drift += [
            shown(drift_row(name, *case, [stream[case] for stream in found])) for case in CASES
        ]
    quiet = [
        shown(quiet_row(name, list(pool.map(stay, given[: asked.baseline]))))
        for name, given in kinds.items()
    ]
    alone = [(risk, name) for risk in (BOUND, 0.7 * BOUND) for name in kinds]
    count = partial(false_alarms, streams=asked.streams, seed=asked.seed)
    false = [shown(row) for row in pool.map(count, alone)]
    return {"quiet": quiet, "drift": drift, "false_alarms": false, "limits": limits}


def stay(given: DriftStream) -> dict[str, float]:
    """Serve without drift; return the audits and the alarms."""
    stream = given.begin(guarded=True)
    audited = audits_ms = total_ms = suspicious = 0.0
    for _ in range(QUIET // CHUNK):
        status = stream.controller.status()
        _, mean_ms, end_ms = stream.facts_of(stream.controller.policy)
        more_ms = status.audit_probability * (end_ms - mean_ms)
        audited += status.audit_probability
        audits_ms, total_ms = audits_ms + more_ms, total_ms + mean_ms + more_ms
        suspicious += status.evidence is Evidence.SUSPICIOUS
        stream.step()
    looks = QUIET // CHUNK
    return {
        "audit_probability": audited / looks,
        "compute": audits_ms / total_ms,
        "suspicious": suspicious / looks,
        "alarms": stream.controller.status().alarms,
    }


def run_all(given: DriftStream) -> dict[tuple[str, float], dict[str, float]]:
    """Serve without drift, and then go on with every kind of drift, each from the same state."""
    found = {}
    for guarded in (False, True):
        stream = given.begin(guarded=guarded)
        for _ in range(BEFORE // CHUNK):
            stream.step()
        for case in CASES:
            if (case[0] == "label skew") is guarded:
                found[case] = run(copy.deepcopy(stream), *case)
    return found


def run(stream: RunningStream, scenario: str, added: float) -> dict[str, float]:
    """Serve until the alarm; ``delay`` is infinite if none comes."""
    controller, policy = stream.controller, stream.controller.policy
    before, weight = stream.population.risk(policy), None
    after = before + added
    if scenario == "label skew":
        weight = skew(stream, policy, added)
        after = float(weight @ wrong_under(stream, policy))
    alarms, audited = controller.status().alarms, controller.status().audited
    delay = warned = math.inf
    for served in range(CHUNK, MOST + 1, CHUNK):
        now = added_at(scenario, added, served - CHUNK)
        stream.step(added=now, weight=weight, only_answers=scenario == "adversarial")
        status = controller.status()
        if status.state.startswith("suspicious"):
            warned = min(warned, served)
        if status.alarms > alarms:
            delay = served
            break
    return {
        "delay": delay,
        "warned": min(warned, delay),
        "audited": status.audited - audited,
        "before": before,
        "after": after,
    }


def added_at(scenario: str, added: float, served: int) -> float:
    """Return the added share of wrong answers, ``served`` samples after the drift began."""
    match scenario:
        case "slow":
            return added * min(served / RAMP, 1.0)
        case "periodic":
            return added * (served % PERIOD < PERIOD // 2)
        case "label skew":
            return 0.0
    return added


def wrong_under(stream: RunningStream, policy: ExitPolicy) -> Any:
    """Return float64[samples]: 1 where a policy's answer differs from the source model's."""
    population = stream.population
    agrees = np.concatenate([population.agrees, np.ones((1, population.size), np.bool_)])
    first = population.answered_at(policy, slice(None))
    return 1.0 - agrees[first, np.arange(population.size)]


def skew(stream: RunningStream, policy: ExitPolicy, added: float) -> Any:
    """Return float64[samples]: weights for drawing samples that raise the risk by ``added``.

    The class with the highest risk becomes more frequent, as far as this is possible.
    """
    wrong, classes = wrong_under(stream, policy), stream.classes
    worst = max(np.unique(classes), key=lambda c: wrong[classes == c].mean())
    everyone, them = (
        np.full(len(wrong), 1 / len(wrong)),
        (classes == worst) / (classes == worst).sum(),
    )
    share = (added / ((them - everyone) @ wrong)).clip(max=1.0)
    return (1 - share) * everyone + share * them


def quiet_row(name: str, streams: list[dict[str, float]]) -> dict[str, Any]:
    alarms = sum(s["alarms"] for s in streams)
    return {
        "part": "quiet",
        "audits": name,
        "samples": QUIET * len(streams),
        "mean_audit_probability": float(np.mean([s["audit_probability"] for s in streams])),
        "audits_share_of_compute": float(np.mean([s["compute"] for s in streams])),
        "share_of_time_called_suspicious": float(np.mean([s["suspicious"] for s in streams])),
        "alarms_in_vain": alarms,
    }


def drift_row(
    name: str, scenario: str, added: float, streams: list[dict[str, float]]
) -> dict[str, Any]:
    delay = np.array([s["delay"] for s in streams])
    quartiles = np.quantile(delay, [0.25, 0.5, 0.75, 0.9], method="higher")
    return {
        "part": "drift",
        "scenario": scenario,
        "added": added,
        "audits": name,
        "streams": len(streams),
        "disagreement_before": streams[0]["before"],
        "disagreement_after": streams[0]["after"],
        "noticed": float(np.isfinite(delay).mean()),
        **{
            f"answers_until_alarm_{which}": finite(value)
            for which, value in zip(("p25", "median", "p75", "p90"), quartiles, strict=True)
        },
        "answers_until_called_suspicious_median": finite(
            float(np.median([s["warned"] for s in streams]))
        ),
        "audits_until_alarm_median": float(np.median([s["audited"] for s in streams])),
    }


def finite(value: float) -> float | str:
    return float(value) if math.isfinite(value) else f"more than {MOST}"


def false_alarms(given: tuple[float, str], *, streams: int, seed: int) -> dict[str, Any]:
    """Count false alarms of the drift alarm alone, at 1,000 times its rate.

    The risk is within the bound.
    """
    risk, name = given
    rng = np.random.default_rng([seed, 6])
    rate, budgeted = 1000 * DEFAULT_RATE, 2.0**-6
    audits = answers = alarms = 0.0
    for _ in range(streams):
        alarm, suspicion, made = DriftAlarm(BOUND, rate=rate), Suspicion(BOUND), 0.0
        while made < 2_000:
            q = suspicion.audit_probability(budgeted) if name == "rising" else budgeted
            coins = np.full(CHUNK, q)
            loss = (rng.random(CHUNK) < risk * q) / q
            if alarm.add(loss, coins) is not None:
                alarms += 1
                alarm.reset()
                suspicion.reset()
            suspicion.count_samples(CHUNK)
            suspicion.observe(loss, coins)
            suspicion.account(coins, budgeted)
            made, answers = made + CHUNK * q, answers + CHUNK
        audits += made
    return {
        "part": "false alarms",
        "risk": risk,
        "audits": name,
        "promised_rate_per_audit": rate,
        "rate_per_audit": alarms / audits,
        "alarms": alarms,
        "answers_per_audit": answers / audits,
    }


def limit(risk: float) -> dict[str, Any]:
    """Return the mean number of audits until the best rule of this rate alarms, if all are audited.

    Among all rules whose false alarms are 1/rate audits apart on average at a risk of ε, the
    cumulative sum for this risk has the smallest delay (Lorden's worst mean; Moustakides 1986). Its
    steps are rounded to one disagreement per whole number of agreements; a linear system gives its
    delays.
    """
    up, down = math.log(risk / BOUND), -math.log((1 - risk) / (1 - BOUND))
    jump, kl = round(up / down), risk * up - (1 - risk) * down
    states = 1
    while mean_time(states, jump, BOUND) < 1 / DEFAULT_RATE:
        states += max(states // 50, 1)
    return {
        "part": "limit",
        "risk": risk,
        "divergence_nats_per_audit": kl,
        "lorden_log_of_mean_time_over_divergence": math.log(1 / DEFAULT_RATE) / kl,
        "audits_until_best_rule_rings_mean": mean_time(states, jump, risk),
    }


def mean_time(states: int, jump: int, risk: float) -> float:
    """Return the mean steps until a walk from 0, by -1 or ``jump``, leaves the states."""
    matrix = np.eye(states)
    for state in range(states):
        matrix[state, max(state - 1, 0)] -= 1 - risk
        if state + jump < states:
            matrix[state, state + jump] -= risk
    return float(np.linalg.solve(matrix, np.ones(states))[0])


def shown(row: dict[str, Any]) -> dict[str, Any]:
    print(
        ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()),
        flush=True,
    )
    return row


if __name__ == "__main__":
    main()
