"""The work of a model's operators: counted where their arithmetic is known, else measured.

Operators from elsewhere, and those whose shapes nobody can infer, have no count. One of them makes
all counts useless, since shares of the work are what matters: then every operator is timed by ONNX
Runtime's profiler.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from offramp.compiler.common.errors import ModelError
from offramp.compiler.cuts.flop_rules import HEAVY, is_heavy
from offramp.compiler.cuts.flow import count_flops
from offramp.compiler.graphs.graph import Dataflow, Operator, bodies
from offramp.compiler.graphs.runtime import GraphRunner, random_inputs

_BATCH = 2
"""Samples of a timed run."""
_RUNS = 7
"""Timed runs, of which the median counts, after one that is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorWork:
    """What each operator of a model costs, in one unit for all."""

    costs: tuple[float, ...]
    """By operator: FLOPs of a sample, or seconds of a run where it was measured."""
    unknown: tuple[str, ...] = ()
    """Types of operators whose arithmetic is not known."""
    measured: bool = False
    """Whether ``costs`` are times; then something was unknown."""


def work_of(proto: onnx.ModelProto, graph: Dataflow) -> OperatorWork:
    """Count the work of an annotated model, or measure it where something cannot be counted.

    Counts are given after all, with what is unknown, if the model cannot be run.
    """
    counted = count_flops(proto, graph)
    unknown = _unknown(graph, counted)
    if not unknown:
        return OperatorWork(costs=counted)
    try:
        times = _measure(proto)
    except (ModelError, RuntimeError):
        return OperatorWork(costs=counted, unknown=unknown)
    costs = [0.0 if graph.is_constant(op) else times.get(op.name, 0.0) for op in graph.operators]
    if not any(costs[op.index] for op in graph.operators if op.kind in unknown):
        return OperatorWork(
            costs=counted, unknown=unknown
        )  # functions run under the names of their parts
    return OperatorWork(costs=tuple(costs), unknown=unknown, measured=True)


def _unknown(graph: Dataflow, counted: Sequence[float]) -> tuple[str, ...]:
    """Types of the operators that do work which was not counted, in order."""
    found = (op for op in graph.operators if _is_unknown(op, counted[op.index]))
    return tuple(dict.fromkeys(op.kind for op in found if not graph.is_constant(op)))


def _is_unknown(op: Operator, counted: float) -> bool:
    if op.kind in HEAVY or op.has_body:
        # Its shapes are not known, or how often a body runs.
        return not counted and not _only_constants(op)
    return is_heavy(op)


def _only_constants(op: Operator) -> bool:
    """Whether it has bodies that compute nothing, such as those that choose between scales."""
    inside = [node for body in bodies(op.proto) for node in body.node]
    return op.has_body and all(node.op_type == "Constant" for node in inside)


def _measure(proto: onnx.ModelProto) -> dict[str, float]:
    """Time operators by name, in seconds; RuntimeError or ModelError if the model cannot be run."""
    feeds = random_inputs(proto, _BATCH)
    with tempfile.TemporaryDirectory(prefix="offramp-work-") as folder:
        runner = GraphRunner(proto, profile=Path(folder) / "work")
        for _ in range(1 + _RUNS):
            runner.run(feeds)
        events = json.loads(runner.end_profile().read_text())
    times: dict[str, list[float]] = {}
    for event in events:
        name = event["name"].removesuffix("_kernel_time")
        if event["cat"] == "Node" and name != event["name"]:
            times.setdefault(name, []).append(event["dur"] / 1e6)
    return {name: statistics.median(found[1:] or found) for name, found in times.items()}
