"""A builder without a GPU: its engines are the graphs themselves, run by ONNX Runtime."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import onnx
from numpy.typing import NDArray

from offramp.bundle.engines import ShapeProfile
from offramp.bundle.schema.serde import to_plain
from offramp.compiler.common.errors import EngineBuildError
from offramp.compiler.engines.build_options import BuildSettings
from offramp.compiler.engines.builder_protocol import BuildProgress, Built, TimedEngine
from offramp.compiler.graphs.runtime import GraphRunner

Outputs = dict[str, NDArray[Any]]
_ROUNDING = ("Cast", "QuantizeLinear", "DequantizeLinear")
"""Operators that a precision adds."""


class FakeBuild(NamedTuple):
    """A build that was asked for."""

    graph_sha256: str
    profiles: tuple[ShapeProfile, ...]
    settings: BuildSettings
    timing_cache: bytes


class FakeBuilder:
    """A builder of engines: a :class:`~offramp.compiler.engines.builder_protocol.EngineBuilder`.

    A profile refuses shapes outside it, as TensorRT's do. ``before_build`` is called with the
    number of earlier builds, and may raise; ``alter`` changes an engine's outputs; ``speeds`` has
    its relative speed in other precisions than fp32, for :meth:`time`.
    """

    def __init__(
        self,
        *,
        gpu: str = "Fake GPU",
        compute_capability: tuple[int, int] = (9, 0),
        version: str = "10.16.0.72",
        before_build: Callable[[int], None] = lambda _: None,
        alter: Callable[[Outputs], Outputs] = lambda outputs: outputs,
        speeds: Mapping[str, float] | None = None,
    ) -> None:
        self.gpu = gpu
        self.compute_capability = compute_capability
        self.version = version
        self.builds: list[FakeBuild] = []
        self.closed = False
        self.speeds = dict(speeds or {})
        self._before_build = before_build
        self._alter = alter

    def build(
        self,
        graph: bytes,
        profiles: Sequence[ShapeProfile],
        settings: BuildSettings,
        *,
        timing_cache: bytes,
        progress: BuildProgress,
    ) -> Built:
        """Keep graph and profiles as the plan."""
        self._before_build(len(self.builds))
        digest = hashlib.sha256(graph).hexdigest()
        self.builds.append(FakeBuild(digest, tuple(profiles), settings, timing_cache))
        for step in range(3):
            progress("Build", step + 1, 3)
            progress("Build an inner part", 1, 7)
        plan = {
            "graph": base64.b64encode(graph).decode(),
            "profiles": [to_plain(profile) for profile in profiles],
            "precision": settings.precision,
        }
        return Built(json.dumps(plan).encode(), timing_cache + digest[:8].encode())

    def run(
        self, plan: bytes, inputs: Mapping[str, NDArray[Any]], profile: int
    ) -> dict[str, NDArray[Any]]:
        """Run the graph that is the plan."""
        content = json.loads(plan)
        shapes = content["profiles"][profile]["inputs"]
        for name, array in inputs.items():
            least, most = shapes[name]["least"], shapes[name]["most"]
            if not all(a <= s <= b for a, s, b in zip(least, array.shape, most, strict=True)):
                raise EngineBuildError(f"{name} {array.shape} is outside of profile {profile}")
        graph = onnx.load_from_string(base64.b64decode(content["graph"]))
        return self._alter(dict(GraphRunner(graph).run(inputs)))

    def time(self, plans: Sequence[TimedEngine], *, rounds: int) -> list[float]:
        """Take a microsecond an operator and row, divided by the precision's speed."""
        return [self._seconds(json.loads(each.plan), each.inputs) for each in plans]

    def _seconds(self, plan: Mapping[str, Any], inputs: Mapping[str, NDArray[Any]]) -> float:
        graph = onnx.load_from_string(base64.b64decode(plan["graph"])).graph
        operators = sum(node.op_type not in _ROUNDING for node in graph.node)
        rows = len(next(iter(inputs.values())))
        return 1e-6 * operators * rows / self.speeds.get(plan["precision"], 1.0)

    def close(self) -> None:
        """Note that it was called."""
        self.closed = True
