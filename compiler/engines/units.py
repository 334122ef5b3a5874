"""Units, each of which becomes one engine, and the ONNX graph of a unit in a precision."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

from offramp.bundle import Bundle, Manifest
from offramp.bundle.engine_index import unit_name
from offramp.bundle.engines import Precision
from offramp.bundle.schema.parts import outputs_after
from offramp.calibration.data.dataset import Dataset
from offramp.calibration.precision.quantization import Ranges, measure_ranges, quantize
from offramp.compiler.common.errors import EngineOptionsError
from offramp.compiler.engines.build_options import PARTS, Part
from offramp.compiler.engines.halving import halve
from offramp.compiler.engines.lowering import folded, lower
from offramp.engine.graphs.assembly import assemble
from offramp.engine.stages.plan import Mode, make_plan


class Unit(NamedTuple):
    """Consecutive segments merged into one engine, with or without the exit after the last one.

    Units are ordered by their first segment. All segments without an exit are the source model,
    whose graph is the bundle's source file.
    """

    first_segment: int
    last_segment: int
    exit: int | None
    """Index into ``Manifest.exits``; ``None`` if the unit ends without an exit."""
    variant: int = 0
    """Index of the variant that the segments and the exit belong to; 0 is the full model."""

    @property
    def name(self) -> str:
        """Name such as ``00-12``, ``00-03-exit1`` with an exit, or ``variant1-00-03-exit1``."""
        return unit_name(*self)


def units_of(bundle: Bundle, parts: Collection[Part] = PARTS) -> tuple[Unit, ...]:
    """Return the units of a bundle, each once, in this order: source, stages, segments, variants.

    A variant has its own stages and segments, up to the variant's answer. The full model that runs
    after a variant is the source unit.
    """
    found: list[Unit] = []
    if "source" in parts:
        found.append(source_unit(bundle.manifest))
    if "stages" in parts:
        found += stage_units(bundle)
    if "segments" in parts:
        found += segment_units(bundle.manifest)
    for shown in bundle.variants()[1:]:
        own = units_of(shown, [part for part in parts if part != "source"])
        begins = shown.manifest.source_begins
        found += [u._replace(variant=shown.number) for u in own if u.first_segment < begins]
    return tuple(dict.fromkeys(found))


def named_units(manifest: Manifest, names: Collection[str]) -> tuple[Unit, ...]:
    """Return units by name; EngineOptionsError if the bundle has no such segments or exit."""
    return tuple(_named_unit(manifest, name) for name in names)


def _named_unit(whole: Manifest, name: str) -> Unit:
    of_variant = re.match(r"variant(\d{1,4})-", name)
    variant = int(of_variant[1]) if of_variant else 0
    if variant > len(whole.variants) or (of_variant and not variant):
        raise EngineOptionsError(
            f"--units: there is no {name!r}: the bundle has {len(whole.variants)} variants, from 1"
        )
    manifest, rest = whole.of_variant(variant), name[of_variant.end() :] if of_variant else name
    exits = {exit_.after_segment: exit_.index for exit_ in manifest.exits}
    last = len(manifest.segments) - 1
    found = re.fullmatch(r"(\d{1,4})-(\d{1,4})(?:-exit(\d{1,4}))?", rest)
    numbers = [None if text is None else int(text) for text in found.groups()] if found else []
    match numbers:
        case [int(first), int(end), exit_] if first <= end <= last:
            if exit_ is None or exits.get(end) == exit_:
                return Unit(first, end, exit_, variant)
    known = ", ".join(f"exit{e} after {after:02d}" for after, e in exits.items()) or "no exits"
    raise EngineOptionsError(
        f"--units: there is no {name!r}; expected segments of 00 to {last:02d} and the exit after "
        f"the last of them, or none ({known}), such as {unit_name(0, last, None, variant)}"
    )


def source_unit(manifest: Manifest) -> Unit:
    """Return the unit of the unmodified model."""
    return Unit(0, len(manifest.segments) - 1, None)


def stage_units(bundle: Bundle) -> tuple[Unit, ...]:
    """Return the stages of the exit policy, for all modes of serving.

    Stages differ between modes if an exit is switched off (NEVER): modes that compare answers still
    run it.
    """
    plans = (make_plan(bundle, mode=mode) for mode in (Mode.LEAVE, Mode.AUDIT))
    stages = (stage for plan in plans for stage in plan.stages)
    return tuple(dict.fromkeys(Unit(*s.unit) for s in stages))


def segment_units(manifest: Manifest) -> tuple[Unit, ...]:
    """Return every segment as a unit, with its exit if there is one.

    Run in a chain, these units can serve any exit policy until engines of its stages are built.
    """
    exits = {exit_.after_segment: exit_.index for exit_ in manifest.exits}
    return tuple(Unit(s.index, s.index, exits.get(s.index)) for s in manifest.segments)


def ranges_of(bundle: Bundle, dataset: Dataset, *, threads: int) -> Ranges:
    """Measure the ranges of a bundle's activations, which are valid for all its units.

    DataError if there are no samples, if the model fails on a sample, or if it has nothing to
    quantise.
    """
    source = folded(bundle.read(bundle.manifest.source.file))
    return measure_ranges(source, dataset, threads=threads)


class UnitGraphs:
    """Graphs that engines are built from; the graph of a unit is deterministic.

    Exits stay in float32 in every precision, and read the cut tensor in float32: the thresholds
    were found on float32 confidences. A graph's inputs and outputs keep their names and types, so
    units of any precision can be chained, by an engine or by ONNX Runtime.
    """

    def __init__(
        self,
        bundle: Bundle,
        precision: Precision,
        *,
        ranges: Ranges | None = None,
        tensorrt_version: str,
    ) -> None:
        """Create the graphs of a precision; ``fp32`` and ``tf32`` have the same graphs.

        ``ranges`` of activations, from :func:`ranges_of`, are needed for ``int8``. Graphs for
        TensorRT 8.x have opset 17.
        """
        if precision == "int8" and ranges is None:
            raise ValueError("int8 needs the ranges of activations; measure them on data first")
        self._bundle = bundle
        self._precision = precision
        self._ranges = ranges if precision == "int8" else None
        self._lowered = int(tensorrt_version.partition(".")[0]) < 10

    def of(self, unit: Unit) -> bytes:
        """Return the serialised ONNX model of a unit.

        The first outputs are the exit's answer and confidence, if there is an exit. Then come the
        tensors that later segments read, or the model's answer. ModelError if TensorRT 8.6 cannot
        read one of its operators.
        """
        graph = self._with_exit(unit, self._in_precision(self._span(unit)))
        return lower(graph) if self._lowered else graph

    def _span(self, unit: Unit) -> bytes:
        manifest = self._bundle.manifest.of_variant(unit.variant)
        if unit == source_unit(manifest):
            return self._bundle.read(manifest.source.file)
        segments = manifest.segments[unit.first_segment : unit.last_segment + 1]
        given = outputs_after(manifest.segments, unit.first_segment, unit.last_segment)
        return assemble([self._bundle.read(s.file) for s in segments], given)

    def _in_precision(self, span: bytes) -> bytes:
        if self._ranges is not None:
            return quantize(folded(span), self._ranges)
        return halve(span) if self._precision == "fp16" else span

    def _with_exit(self, unit: Unit, span: bytes) -> bytes:
        if unit.exit is None:
            return span
        manifest = self._bundle.manifest.of_variant(unit.variant)
        exit_ = manifest.exits[unit.exit]
        given = outputs_after(manifest.segments, unit.first_segment, unit.last_segment)
        outputs = [exit_.output, exit_.confidence, *given]
        return assemble([span, self._bundle.read(exit_.file)], outputs)
