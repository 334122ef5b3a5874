"""Growth of the optimiser's time with the number of devices, of one type and of three.

    python -m benchmarks.planner [--segments 34] [--repeat 5] [--json FILE] [--svg FILE]

CPU milliseconds of one plan, MEASURED, minimum of the repetitions: all batch sizes from 1 to 64,
for the highest rate within 100 ms, and for half the rate of the unmodified model at the least cost.
The cluster is that of benchmarks/clusters.py; three types have a quarter, a quarter and a half of
the devices. ``growth`` is the exponent from the previous number of devices (1 is linear). ``--svg``
draws it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.clusters import cluster_of, going_on, model_of
from benchmarks.common import CHART_STYLE, make_parser
from benchmarks.e3_plans import timed
from markupsafe import Markup
from rich.table import Table

from offramp.cluster.planning.cluster import Cluster
from offramp.cluster.planning.goal import PlanningGoal
from offramp.cluster.planning.optimiser import make_cluster_plan
from offramp.commands.svg import Scale, axes, drawing, element, path, text
from offramp.tools.bench.common.output import describe_environment, wide_console, write_json

SIZES = (8, 16, 32, 64)
COLOURS = {"one type": "#30475e", "three types": "#5a9a59"}


def main() -> None:
    """Measure, print, and write if asked."""
    parser = make_parser(__doc__)
    parser.add_argument("--segments", type=int, default=34)
    parser.add_argument("--repeat", type=int, default=5, metavar="N")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw milliseconds by devices")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in COLOURS:
        for devices in SIZES:
            row = {"types": name, "devices": devices}
            row |= measure(cluster(name, devices, options.segments), options)
            if devices > SIZES[0]:
                row["growth"] = math.log2(_longest(row) / _longest(rows[-1]))
            rows.append(row)
    table = Table(*rows[-1], title=f"CPU ms of one plan, {options.segments} segments, MEASURED")
    for row in rows:
        table.add_row(*(_shown(row.get(name)) for name in rows[-1]))
    wide_console().print(table)
    if options.svg is not None:
        options.svg.write_text(plot(rows, options.segments) + "\n")
    if options.json is not None:
        environment = describe_environment(seed=None, repeat=options.repeat)
        document = {"measured": "CPU milliseconds of one plan", "segments": options.segments}
        write_json(options.json, {**document, "rows": rows, "environment": environment})


def cluster(name: str, devices: int, segments: int) -> Cluster:
    """Return a cluster of devices of one type or of three."""
    quarter = devices // 4
    unequal = {"V100": quarter, "P100": quarter, "K80": devices - 2 * quarter}
    return cluster_of({"V100": devices} if name == "one type" else unequal, segments)


def measure(cluster: Cluster, options: Any) -> dict[str, float]:
    """Time plans for the highest rate, and plans for the lowest cost."""
    model = model_of(going_on(0.8, options.segments))
    baseline = make_cluster_plan(model, cluster, PlanningGoal(slo_s=0.1)).baseline
    assert baseline is not None
    goals = {
        "highest_rate_ms": PlanningGoal(slo_s=0.1),
        "least_cost_ms": PlanningGoal(slo_s=0.1, rate_rps=baseline.rate_rps / 2),
    }
    return {
        name: 1e3 * min(timed(model, cluster, goal) for _ in range(options.repeat))
        for name, goal in goals.items()
    }


def plot(rows: Sequence[Mapping[str, Any]], segments: int) -> str:
    """Draw the milliseconds of the slower kind of plan by devices: SVG, log-log.

    The dashed line is linear growth from the first size.
    """
    sizes = [math.log10(size) for size in SIZES]
    x = Scale(low=sizes[0], high=sizes[-1], start=60.0, end=480.0)
    y = Scale(low=1.0, high=3.0, start=250.0, end=20.0)
    marks = [(1.0, "10 ms"), (2.0, "100 ms"), (3.0, "1 s")]
    counts = [(value, f"{size}") for value, size in zip(sizes, SIZES, strict=True)]
    drawn = [element("style", Markup(CHART_STYLE)), axes(x, y, counts, marks)]
    for name, colour in COLOURS.items():
        times = [math.log10(_longest(row)) for row in rows if row["types"] == name]
        points = [(x(size), y(value)) for size, value in zip(sizes, times, strict=True)]
        ends = [(x(sizes[0]), y(times[0])), (x(sizes[-1]), y(times[0] + sizes[-1] - sizes[0]))]
        lines = path(ends, "linear"), path(points, "measured")
        drawn.append(element("g", *lines, stroke=colour))
        drawn.append(text(x(sizes[-1]) + 8, points[-1][1] + 4, name))
    label = f"devices; CPU time of one plan of {segments} segments, MEASURED"
    drawn.append(text(60.0, 290.0, label))
    picture = drawing(600.0, 300.0, "Milliseconds of the optimiser by devices", *drawn)
    return str(picture).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)


def _longest(row: Mapping[str, Any]) -> float:
    return max(float(row["highest_rate_ms"]), float(row["least_cost_ms"]))


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
