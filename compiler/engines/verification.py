"""Proof that an engine computes what its graph does: it is run beside ONNX Runtime on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx
from numpy.typing import NDArray

from offramp.bundle import Bundle
from offramp.bundle.engines import Precision
from offramp.calibration.dataset import Dataset
from offramp.compiler.engines.halving import rounded
from offramp.compiler.engines.profiles import ModelShapes, Point, SizedProfile, bound
from offramp.compiler.engines.units import Unit
from offramp.compiler.errors import EngineBuildError
from offramp.compiler.runtime import GraphRunner, random_inputs, relative_difference
from offramp.engine.assembly import assemble

TOLERANCES: Mapping[Precision, float] = {
    "fp32": 1e-3,  # sums in another order, through all layers of a model
    "tf32": 5e-3,  # products of 10 bits, sums in fp32
    "fp16": 2e-2,  # each side rounds elsewhere: rounding less, or sums too, differed by 0.011
    "int8": 0.15,  # roundings to either side of a step add up: two kernels on a CPU differ by 0.044
}
"""Difference allowed, relative to an output's largest magnitude. A wrong engine differs by far
more: a missing layer or a swapped input changes most of an output."""

Tensors: TypeAlias = Mapping[str, NDArray[Any]]
Run: TypeAlias = Callable[[Tensors, int], Mapping[str, NDArray[Any]]]
"""Runs an engine once on inputs by name, with the profile of an index."""


class Verifier:
    """Compares engines of a bundle with their graphs, on inputs that the model could get.

    What a unit reads inside the model is computed by the segments before it, as random numbers
    there would be no activations of that model.
    """

    def __init__(
        self,
        bundle: Bundle,
        shapes: ModelShapes,
        precision: Precision,
        *,
        samples: Dataset | None = None,
        seed: int = 0,
    ) -> None:
        """Prepare for the engines of one precision; without samples, inputs are random."""
        self._bundle = bundle
        self._shapes = shapes
        self._tolerance = TOLERANCES[precision]
        self._samples = samples
        self._seed = seed
        self._source = onnx.load_from_string(bundle.read(bundle.manifest.source.file))

    def check(self, unit: Unit, graph: bytes, profiles: Sequence[SizedProfile], run: Run) -> float:
        """Run an engine at the best and the least shapes of every profile.

        Returns:
            The largest difference found, as a share of the output's largest magnitude.

        Raises:
            EngineBuildError: An output is missing, has another type or shape, is no number, or
                differs beyond the tolerance; or the graph itself gives no finite number.
        """
        proto = onnx.load_from_string(rounded(graph))
        reads = [info.name for info in proto.graph.input]
        reference, prefix = GraphRunner(proto), self._prefix(unit)
        worst = 0.0
        for index, profile in enumerate(profiles):
            for point in dict.fromkeys([profile.sizes.best, profile.sizes.least]):
                feeds = self._feeds(point)
                values = {**feeds, **(prefix.run(feeds) if prefix else {})}
                inputs = {name: values[name] for name in reads}
                wanted, found = reference.run(inputs), run(inputs, index)
                where = f"profile {index}, {point.describe()}"
                worst = max(worst, self._compare(unit, wanted, found, where))
        return worst

    def _compare(self, unit: Unit, wanted: Tensors, found: Tensors, where: str) -> float:
        allowed = self._allowed(unit, wanted)
        worst = 0.0
        for name, value in wanted.items():
            if name not in found:
                raise EngineBuildError(f"the engine gives no output {name!r} ({where})")
            actual = found[name]
            if actual.dtype == np.int32 and value.dtype == np.int64:
                actual = actual.astype(np.int64)  # TensorRT 8.6 has no 64-bit integers
            if (actual.dtype, actual.shape) != (value.dtype, value.shape):
                raise EngineBuildError(
                    f"output {name!r} of the engine is {actual.dtype} {list(actual.shape)}, that "
                    f"of its graph {value.dtype} {list(value.shape)} ({where})"
                )
            if not np.isfinite(value).all():
                raise EngineBuildError(
                    f"output {name!r} of the graph itself is not finite on a CPU ({where}); build "
                    "it with a finer --precision (tf32 or fp32) or give other --data"
                )
            difference = relative_difference(actual, value)
            if not difference <= allowed[name]:  # NaN is no agreement
                raise EngineBuildError(
                    f"output {name!r} of the engine differs from ONNX Runtime's by "
                    f"{difference:.1e} of its largest magnitude, allowed are {allowed[name]:.1e} "
                    f"({where}); please report this with the versions of TensorRT and the driver"
                )
            worst = max(worst, difference)
        return worst

    def _allowed(self, unit: Unit, wanted: Tensors) -> dict[str, float]:
        """A softmax passes on the *absolute* error of its logits, which is larger than 1 · tol."""
        allowed = dict.fromkeys(wanted, self._tolerance)
        manifest = self._bundle.manifest
        if unit.exit is not None and manifest.answer.form == "logits":
            exit_ = manifest.exits[unit.exit]
            largest = float(np.abs(wanted[exit_.output].astype(np.float64)).max(initial=0.0))
            allowed[exit_.confidence] = self._tolerance * max(1.0, largest)
        return allowed

    def _prefix(self, unit: Unit) -> GraphRunner | None:
        """The segments before a unit."""
        before = self._bundle.manifest.segments[: unit.first_segment]
        if not before:
            return None
        parts = [self._bundle.read(segment.file) for segment in before]
        return GraphRunner(onnx.load_from_string(assemble(parts, [before[-1].output])))

    def _feeds(self, point: Point) -> dict[str, NDArray[Any]]:
        """Inputs of the model at a point: samples where they are large enough, else random."""
        shapes = self._shapes.inputs_at(point)
        if self._samples is not None:
            arrays = self._samples.take(np.arange(point.batch) % len(self._samples))
            cut = {n: a[tuple(slice(size) for size in shapes[n])] for n, a in arrays.items()}
            if all(cut[name].shape == shape for name, shape in shapes.items()):
                return cut
        return dict(random_inputs(bound(self._source, shapes), point.batch, seed=self._seed))
