"""Growth of the time to read, cut and slice a model with its number of operators.

    python -m benchmarks.large_models [--sizes 1000,5000,20000] [--repeat 3]
        [--json FILE] [--svg FILE]

The models are residual networks of five operators a block, 16 values wide, almost without weights.
Times are CPU seconds of this process, the minimum over the repetitions. Reading is timed without
and with onnxslim, which is not run on the largest model. The last column is the growth of cutting
and slicing: the exponent of the number of operators, from the size before (1 is linear). ``--svg``
draws it.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx
from benchmarks.common import CHART_STYLE, make_parser
from markupsafe import Markup
from onnx import helper, numpy_helper
from rich.table import Table

from offramp.commands.svg import Scale, axes, drawing, element, path, text
from offramp.compiler.cuts.cuts import find_cuts
from offramp.compiler.cuts.exit_placement import choose_candidates
from offramp.compiler.cuts.slicing import split
from offramp.compiler.frontend.model import read_model
from offramp.compiler.frontend.preparation import MOST_SIMPLIFIED
from offramp.tools.bench.common.output import describe_environment, wide_console, write_json

WIDTH, CLASSES = 16, 10

_Result = TypeVar("_Result")


def main() -> None:
    """Measure, print, and write if asked."""
    parser = make_parser(__doc__)
    parser.add_argument("--sizes", default="1000,2000,5000,10000,20000", metavar="A,B,…")
    parser.add_argument("--repeat", type=int, default=3, metavar="N")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw seconds by operators")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for operators in map(int, options.sizes.split(",")):
        row = min((measure(operators) for _ in range(options.repeat)), key=_cutting)
        if rows:
            before = rows[-1]
            row["growth"] = math.log(_cutting(row) / _cutting(before)) / math.log(
                row["operators"] / before["operators"]
            )
        rows.append(row)
    table = Table(*rows[-1], title="Seconds of CPU, MEASURED")
    for row in rows:
        table.add_row(*(_shown(row.get(name)) for name in rows[-1]))
    wide_console().print(table)
    if options.svg is not None:
        options.svg.write_text(plot(rows) + "\n")
    if options.json is not None:
        environment = describe_environment(seed=0, repeat=options.repeat)
        found = {"measured": "CPU seconds", "rows": rows, "environment": environment}
        write_json(options.json, found)


def measure(operators: int) -> dict[str, Any]:
    """Read, cut and slice a model with about so many operators."""
    model = residual(operators)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(model, path)
        read, read_s = timed(lambda: read_model(path, simplify=False))
        simplified_s = None
        if operators <= MOST_SIMPLIFIED:
            _, simplified_s = timed(lambda: read_model(path))
    analysis, cut_s = timed(lambda: find_cuts(read))
    points = choose_candidates(analysis)
    segments, slice_s = timed(lambda: split(read, points))
    return {
        "operators": len(read.proto.graph.node),
        "cut_points": len(analysis.cuts),
        "segments": len(segments),
        "read_s": read_s,
        "read_with_onnxslim_s": simplified_s,
        "cut_s": cut_s,
        "slice_s": slice_s,
        "cut_and_slice_s": cut_s + slice_s,
    }


def plot(rows: Sequence[Mapping[str, Any]]) -> str:
    """Draw the seconds of reading, and of cutting and slicing, by operators: SVG, log-log.

    The dashed line is linear growth from the first size.
    """
    sizes = [math.log10(row["operators"]) for row in rows]
    lines = {"read": "#30475e", "cut and slice": "#5a9a59"}
    seconds = {
        name: [math.log10(max(row[f"{name.replace(' ', '_')}_s"], 1e-3)) for row in rows]
        for name in lines
    }
    every = [value for values in seconds.values() for value in values]
    x = Scale(low=min(sizes), high=max(sizes), start=60.0, end=500.0)
    y = Scale(low=math.floor(min(every)), high=math.ceil(max(every)), start=250.0, end=20.0)
    marks = [(float(tick), f"{10.0**tick:g} s") for tick in range(int(y.low), int(y.high) + 1)]
    counts = [(size, f"{row['operators']:,}") for size, row in zip(sizes, rows, strict=True)]
    drawn = [element("style", Markup(CHART_STYLE)), axes(x, y, counts, marks)]
    for name, colour in lines.items():
        points = [(x(size), y(value)) for size, value in zip(sizes, seconds[name], strict=True)]
        start = seconds[name][0]
        ends = [(x(sizes[0]), y(start)), (x(sizes[-1]), y(start + sizes[-1] - sizes[0]))]
        linear, measured = path(ends, "linear"), path(points, "measured")
        drawn.append(element("g", linear, measured, stroke=colour))
        drawn.append(text(x(sizes[-1]) + 8, points[-1][1] + 4, name))
    drawn.append(text(60.0, 290.0, "operators of the model; seconds of CPU, MEASURED"))
    picture = drawing(600.0, 300.0, "Seconds by operators, growing about linearly", *drawn)
    return str(picture).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)


def timed(action: Callable[[], _Result]) -> tuple[_Result, float]:
    """Return the result of an action, and its CPU seconds."""
    start = time.process_time()
    result = action()
    return result, time.process_time() - start


def residual(operators: int) -> onnx.ModelProto:
    """Make a residual MLP with about so many operators."""
    rng = np.random.default_rng(0)
    nodes: list[onnx.NodeProto] = []
    weights: list[onnx.TensorProto] = []

    def weight(name: str, *shape: int) -> str:
        values = (rng.standard_normal(shape) * 0.1).astype(np.float32)
        weights.append(numpy_helper.from_array(values, name))
        return name

    x = "x"
    for block in range((operators - 1) // 5):
        name = f"block{block}"
        up, down = weight(f"{name}/up", WIDTH, WIDTH), weight(f"{name}/down", WIDTH, WIDTH)
        bias = weight(f"{name}/bias", WIDTH)
        steps = [("MatMul", x, up), ("Add", "1", bias), ("Relu", "2"), ("MatMul", "3", down)]
        for i, (kind, first, *others) in enumerate(steps, 1):
            read = first if first == x else f"{name}/{first}"
            nodes.append(helper.make_node(kind, [read, *others], [f"{name}/{i}"]))
        nodes.append(helper.make_node("Add", [f"{name}/4", x], [name]))
        x = name
    nodes.append(helper.make_node("MatMul", [x, weight("last", WIDTH, CLASSES)], ["logits"]))
    float_ = onnx.TensorProto.FLOAT
    inputs = [helper.make_tensor_value_info("x", float_, ["batch", WIDTH])]
    outputs = [helper.make_tensor_value_info("logits", float_, ["batch", CLASSES])]
    graph = helper.make_graph(nodes, "residual", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _cutting(row: dict[str, Any]) -> float:
    return float(row["cut_and_slice_s"])


def _shown(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:.2f}"


if __name__ == "__main__":
    main()
