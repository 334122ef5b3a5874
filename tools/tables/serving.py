"""Tables of servers: latency by load, control under drift, policies, front ends, learning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from offramp.tools.tables.rows import Result, Rows, Table, by, percent, times


def learning(result: Result) -> Rows:
    """Yield the latency of requests in each phase of learning."""
    yield "phase", "requests", "p50", "p99"
    phases = result["figures"]["latency_ms"]
    for phase in ("recording", "compiling", "switching", "serving"):
        row = phases[phase]
        yield f"`{phase}`", f"{row['requests']:,}", f"{row['p50']:.1f} ms", f"{row['p99']:.1f} ms"


def policies(result: Result) -> Rows:
    """Yield the figures of every policy under the recorded trace, without deadlines."""
    yield "system", "p50, ms", "p99, ms", "agreement"
    for name, row in result["tables"]["no deadline"].items():
        shown = name.replace("source:", "unmodified model, ")
        latency = row["latency_ms"]
        yield shown, f"{latency['p50']:.0f}", f"{latency['p99']:.0f}", percent(row["agreement"])


def apparate(result: Result) -> Rows:
    """Yield median and p99 latency, relative to the unmodified model's, and agreement, by load."""
    systems = ("apparate", "release", "audit", "leave")
    yield "workload, load", "off: p50, p99 in ms", "optimal, SIMULATED", *systems
    rows = by(result["latency"], "workload", "load", "system")
    for workload, load in dict.fromkeys(
        (row["workload"], row["load"]) for row in result["latency"]
    ):
        off = rows[workload, load, "off"]
        latency = off["latency_ms"]
        yield (
            f"{workload}, {percent(load, 0)}",
            f"{latency['p50']:.2f}, {latency['p99']:.1f}",
            _latencies(rows[workload, load, "optimal"], off),
            *(_cell(rows[workload, load, system], off) for system in systems),
        )


def apparate_slo(result: Result) -> Rows:
    """Yield the share of requests that missed their deadline, and the others' median latency."""
    systems = ("apparate", "release", "audit", "leave")
    yield "objective", "off", *systems
    rows = by(result["slo"], "slo_factor", "system")
    for factor in dict.fromkeys(row["slo_factor"] for row in result["slo"]):
        off = rows[factor, "off"]
        cells = []
        for row in (rows[factor, system] for system in systems):
            median = row["latency_ms"]["p50"] / off["latency_ms"]["p50"]
            cells.append(f"{percent(1 - row['attainment'])}, {times(median)}")
        yield f"{factor:g} ×", percent(1 - off["attainment"]), *cells


def apparate_budgets(result: Result) -> Rows:
    """Yield latency and agreement by ramp budget: Apparate as published, and our release mode."""
    return _by_limit(result["ramp_budget"], "ramp budget")


def apparate_constraints(result: Result) -> Rows:
    """Yield latency and agreement by constraint: Apparate as published, and our release mode."""
    return _by_limit(result["constraint"], "constraint")


def _by_limit(rows: list[Result], limit: str) -> Rows:
    yield limit, "apparate", "release"
    systems = by(rows, "system")
    for name in systems:
        if name.startswith("apparate "):
            value = name.removeprefix("apparate ")
            cells = (
                _cell(systems[f"{s} {value}"], systems["off"]) for s in ("apparate", "release")
            )
            yield percent(float(value), 0), *cells


def _latencies(row: Result, off: Result) -> str:
    return ", ".join(times(row["latency_ms"][p] / off["latency_ms"][p]) for p in ("p50", "p99"))


def _cell(row: Result, off: Result) -> str:
    return f"{_latencies(row, off)}, {percent(row['agreement'])}"


_CONTROLLERS: Final[Mapping[str, str]] = {
    "leave": "thresholds as compiled",
    "static-shared": "one threshold, tuned once",
    "static-separate": "a threshold for each exit, tuned once",
    "apparate": "Apparate, tuned on 16 samples",
    "apparate-512": "Apparate, tuned on 512 samples",
    "pame": "PAME (7.6), given all feedback",
    "certified-release": "ours, release mode",
    "certified": "ours, audit mode",
}


def adapt(result: Result) -> Rows:
    """Yield agreement and time saved by controller and kind of shift."""
    scenarios = {
        "difficulty": "easy to hard",
        "classes": "class mix",
        "corruption": "growing noise",
        "abrupt": "abrupt noise",
    }
    yield "controller", *scenarios.values(), "lowest segment"
    shifts = {c["scenario"]: by(c["runs"], "controller") for c in result["comparisons"]}
    for controller, name in _CONTROLLERS.items():
        scores = [shifts[scenario][controller]["score"] for scenario in scenarios]
        lowest = min(part["whole"]["agreement"] for s in scores for part in s["segments"])
        cells = (
            f"{percent(s['whole']['agreement'])}, {percent(s['whole']['latency_savings'], 0)}"
            for s in scores
        )
        yield name, *cells, percent(lowest)


def depth(result: Result) -> Rows:
    """Yield attainment and agreement of SlackFit, and of the best single depth, by load."""
    policies = ("slackfit", "slackfit-bare", "run-through")
    yield "load", *(f"`{policy}`" for policy in policies), "in hindsight"
    for name, load in result["loads"].items():
        rows, best = load["rows"], load["hindsight"]
        cells = (
            f"{rows[policy]['attainment']:.4f} · {percent(rows[policy]['agreement'])}"
            for policy in policies
        )
        yield (
            f"{name} ({load['rate']:,.0f}/s)",
            *cells,
            (f"`{best}`, {percent(rows[best]['agreement'])}"),
        )


def buckets(result: Result) -> Rows:
    """Yield attainment and accuracy of the published SlackFit by curve and number of buckets."""
    counts = ("3 buckets", "6 buckets", "12 buckets", "64 buckets")
    yield "curves", *counts
    names = {
        "GPU": "of a GPU: a batch of 16 takes 5 times as long as one",
        "fitted": 'nearly linear, as of a CPU: "fitted"',
        "linear": 'nearly linear: "linear"',
    }
    for curve, name in names.items():
        rows = result["results"][f"{curve}, cv2=8"]
        cells = (
            f"{rows[c]['attainment']:.4f} · {percent(rows[c]['agreement'], 2)}" for c in counts
        )
        yield name, *cells


def superserve(result: Result) -> Rows:
    """Yield attainment and accuracy by policy under SuperServe's loads, on emulated devices."""
    policies = (
        "slackfit-bare", "slackfit", "max-batch", "max-accuracy", "cheapest",
        "fixed:final@5", "fixed:final@4", "fixed:final@3",
    )  # fmt: skip
    yield "load", *(f"`{policy}`" for policy in policies)
    parts = result["experiments"]
    loads = {f"CV² {cv}": [r for r in parts["bursts"] if r["CV²"] == cv] for cv in (2, 4, 8)}
    for rise in (250, 5000):
        loads[f"2,500 to 7,400 requests/s, by {rise:,} a second"] = [
            row for row in parts["accelerating"] if row["per s²"] == rise
        ]
    loads["5,500, in spikes 8,750"] = parts["spikes"]
    loads["5,000, CV² 2, a worker killed every 12 s"] = parts["kills"]
    for name, rows in loads.items():
        found = by(rows, "policy")
        yield name, *(_attainment(found[p]) if p in found else "–" for p in policies)


def _attainment(row: Result) -> str:
    return f"{row['attainment']:.4f} · {row['accuracy %']:.2f} %"


def lengths(result: Result) -> Rows:
    """Yield figures of padded batches, relative to batches of equal lengths."""
    yield (
        "lengths", "requests a second, over equal lengths only", "CPU time a request",
        "mean batch", "positions added",
    )  # fmt: skip
    for key, name in (("sentences", "sentences, median 20"), ("reviews", "reviews, median 80")):
        part = result["measured"][key]["under way 16"]
        rate, cpu = (part["padded_over_equal"][k] for k in ("requests_per_s", "cpu_ms_per_request"))
        padded, equal = part["padded"], part["equal"]
        yield (
            name,
            f"{rate['median']:.2f} ({rate['least']:.2f} to {rate['most']:.2f})",
            f"{cpu['median']:.2f}",
            f"{padded['mean_batch']:.1f}, not {equal['mean_batch']:.1f}",
            percent(padded["added_share_of_positions"]),
        )


def parallel(result: Result) -> Rows:
    """Yield throughput, time in stages and late requests by PAME's τ_b."""
    yield (
        "τ_b", "CPU: requests/s", "ms in stages", "late", "emulated device: requests/s",
        "ms in stages", "late",
    )  # fmt: skip
    device = by(result["experiments"]["device"], "τ_b")
    for cpu in result["experiments"]["cpu"]:
        other = device[cpu["τ_b"]]
        yield (
            "9, no limit" if cpu["τ_b"] == "9" else cpu["τ_b"],
            f"{cpu['throughput']:,.0f}", f"{cpu['in stages ms']:.2f}", percent(cpu["late"]),
            f"{other['throughput']:,.0f}", f"{other['in stages ms']:.1f}", percent(other["late"]),
        )  # fmt: skip


def front(result: Result) -> Rows:
    """Yield requests per second, and processor time per request, for a model of one operator."""
    return _fronts(result, "", (1, 32, 128))


def front_5ms(result: Result) -> Rows:
    """Yield the columns of :func:`front` for a model of 5 ms."""
    return _fronts(result, "", (1, 8, 32, 128))


def front_example(result: Result) -> Rows:
    """Yield the columns of :func:`front` for the example in leave mode.

    The other servers run the example's unmodified model.
    """
    return _fronts(result, "leave, ", (8, 32, 128))


def _fronts(result: Result, mode: str, clients: tuple[int, ...]) -> Rows:
    yield (
        "requests/s (processor time each)",
        *("1 client" if count == 1 else f"{count}" for count in clients),
    )
    names = {
        f"{mode}0 front ends": "`eeserve`",
        f"{mode}2 front ends": "`--frontends 2`",
        "bare grpc.aio": "bare grpc.aio",
        "Triton 2.51": "Triton",
    }
    for key, name in names.items():
        rows = [result["figures"][f"{key}, {count} clients"] for count in clients]
        yield (
            name,
            *(f"{r['requests_per_s']:,.0f} ({r['processor_us_a_request']:,.0f} µs)" for r in rows),
        )


def superserve_example(result: Result) -> Rows:
    """Yield requests in time, and accuracy, on the shipped supernet by policy and load."""
    simulated = result["simulated"]
    loads = {case["trace"].partition("CV² ")[2]: case["rows"] for case in simulated["cases"][:-1]}
    loads["rising"] = simulated["cases"][-1]["rows"]
    loads["streams lost"] = simulated["losing_streams"]["rows"]
    yield (
        "SIMULATED: in time, accuracy",
        *(f"CV² {load}" if load.isdigit() else load for load in loads),
    )
    for policy in ("slackfit", "cheapest", "max-batch", "max-accuracy"):
        rows = [load[policy] for load in loads.values()]
        yield f"`{policy}`", *(f"{r['attainment']:.2%}, {r['agreement']:.1%}" for r in rows)


def simulator(result: Result) -> Rows:
    """Yield how far simulated latencies are from those of a real server, for the same trace."""
    yield (
        "policy", "requests/s", "measured p50, p90, p99, ms", "simulated differs by",
        "in time, measured and simulated",
    )  # fmt: skip
    for row in result["rows"]:
        if row["measured_on"] != "server":
            continue
        measured = ", ".join(f"{ms:.1f}" for ms in row["measured_ms"].values())
        errors = ", ".join(f"{100 * error:+.0f} %" for error in row["error"].values())
        in_time = f"{percent(row['measured_attainment'])}, {percent(row['simulated_attainment'])}"
        yield f"`{row['policy']}`", str(row["rate"]), measured, errors, in_time


TABLES: Final[Mapping[str, Table]] = {
    "adapt": Table(adapt, ("adapt",)),
    "apparate": Table(apparate, ("apparate",)),
    "apparate-budgets": Table(apparate_budgets, ("apparate",)),
    "apparate-constraints": Table(apparate_constraints, ("apparate",)),
    "apparate-slo": Table(apparate_slo, ("apparate_slo",)),
    "depth": Table(depth, ("depth",)),
    "front": Table(front, ("front",)),
    "front-5ms": Table(front_5ms, ("front_5ms",)),
    "front-example": Table(front_example, ("front_example",)),
    "learning": Table(learning, ("learning",)),
    "lengths": Table(lengths, ("lengths",)),
    "parallel": Table(parallel, ("parallel",)),
    "simulator": Table(simulator, ("simulator",)),
    "policies": Table(policies, ("policies_azure_code",)),
    "superserve": Table(superserve, ("superserve_emulated",)),
    "superserve-buckets": Table(buckets, ("superserve_buckets",)),
    "superserve-example": Table(superserve_example, ("superserve_example",)),
}
