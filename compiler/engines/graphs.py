"""The ONNX graph of a unit in a precision: what an engine is built from.

Exits stay float32 in every precision and read the float32 cut tensor: the thresholds were found
on float32 confidences. The graph's inputs and outputs keep their names and types, so that units
of any precision can be chained, by an engine or by ONNX Runtime.
"""

from __future__ import annotations

from offramp.bundle import Bundle
from offramp.bundle.engines import Precision
from offramp.calibration.dataset import Dataset
from offramp.calibration.quantization import Ranges, measure_ranges, quantize
from offramp.compiler.engines.constants import folded
from offramp.compiler.engines.halving import halve
from offramp.compiler.engines.lowering import lower
from offramp.compiler.engines.units import Unit, source_unit
from offramp.engine.assembly import assemble


def ranges_of(bundle: Bundle, dataset: Dataset, *, threads: int) -> Ranges:
    """Measure the ranges of a bundle's activations, which hold for all its units.

    Raises:
        DataError: There are no samples, the model fails on one, or has nothing to quantise.
    """
    source = folded(bundle.read(bundle.manifest.source.file))
    return measure_ranges(source, dataset, threads=threads)


class UnitGraphs:
    """Gives the graphs of a bundle's units; the same unit gives the same bytes."""

    def __init__(
        self,
        bundle: Bundle,
        precision: Precision,
        *,
        ranges: Ranges | None = None,
        tensorrt_version: str,
    ) -> None:
        """Say what the graphs are for.

        Args:
            bundle: The model's parts.
            precision: ``fp32`` and ``tf32`` have the same graphs.
            ranges: Of the activations, for ``int8``: those of :func:`ranges_of`.
            tensorrt_version: 8.x gets graphs of opset 17.

        Raises:
            ValueError: ``int8`` without ranges.
        """
        if precision == "int8" and ranges is None:
            raise ValueError("int8 needs the ranges of activations; measure them on data first")
        self._bundle = bundle
        self._precision = precision
        self._ranges = ranges
        self._lowered = int(tensorrt_version.partition(".")[0]) < 10

    def of(self, unit: Unit) -> bytes:
        """Give the serialised ONNX model of a unit.

        Its outputs are the exit's answer and confidence, where there is an exit, then the last
        segment's output.

        Raises:
            ModelError: TensorRT 8.6 cannot read an operator of it; the message has the remedy.
            BundleIntegrityError: A file changed since the bundle was opened.
        """
        graph = self._with_exit(unit, self._in_precision(self._span(unit)))
        return lower(graph) if self._lowered else graph

    def _span(self, unit: Unit) -> bytes:
        manifest = self._bundle.manifest
        if unit == source_unit(manifest):
            return self._bundle.read(manifest.source.file)
        segments = manifest.segments[unit.first_segment : unit.last_segment + 1]
        return assemble([self._bundle.read(s.file) for s in segments], [segments[-1].output])

    def _in_precision(self, span: bytes) -> bytes:
        if self._precision == "fp16":
            return halve(span)
        if self._precision == "int8":
            assert self._ranges is not None
            return quantize(folded(span), self._ranges)
        return span

    def _with_exit(self, unit: Unit, span: bytes) -> bytes:
        if unit.exit is None:
            return span
        manifest = self._bundle.manifest
        exit_ = manifest.exits[unit.exit]
        outputs = [exit_.output, exit_.confidence, manifest.segments[unit.last_segment].output]
        return assemble([span, self._bundle.read(exit_.file)], outputs)
