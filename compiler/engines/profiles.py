"""Shape profiles of a unit's inputs, for every batch range and every range of other sizes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import onnx

from offramp.bundle import Bundle, Manifest
from offramp.bundle.engines import ShapeProfile, ShapeRange
from offramp.compiler.common.errors import EngineOptionsError
from offramp.compiler.engines.build_options import SizeRange, describe_ranges
from offramp.compiler.graphs.graph import copied
from offramp.compiler.graphs.runtime import GraphRunner, random_inputs
from offramp.engine.graphs.assembly import assemble

MANY_PROFILES = 16
"""Number of profiles above which a build takes long, and contexts need much device memory."""

_PROBED_BATCH = 2
"""Batch size at which the model is run to find shapes. It is small, and not 1, because dimensions
of size 1 are broadcast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The ranges of the model's symbolic sizes in one profile."""

    batch: SizeRange
    others: dict[str, SizeRange]
    """Ranges of other sizes, by the model's name for each size."""

    @property
    def least(self) -> Point:
        """Point (:class:`Point`) with the smallest value of each size."""
        return Point(self.batch.first, tuple((n, r.first) for n, r in self.others.items()))

    @property
    def best(self) -> Point:
        """Point (:class:`Point`) with the largest value of each size; engines are tuned for it."""
        return Point(self.batch.last, tuple((n, r.last) for n, r in self.others.items()))


class Point(NamedTuple):
    """One value for each symbolic size of the model."""

    batch: int
    others: tuple[tuple[str, int], ...]
    """Values of the sizes other than the batch, with the model's name for each size."""

    def describe(self) -> str:
        """Return text such as ``batch 8, sequence 64``, for messages."""
        return ", ".join(f"{name} {size}" for name, size in (("batch", self.batch), *self.others))


class SizedProfile(NamedTuple):
    """A shape profile of a unit, and the symbolic sizes that it was made from."""

    sizes: Sizes
    shapes: ShapeProfile


def symbols_of(manifest: Manifest) -> dict[str, SizeRange]:
    """Return the symbolic sizes other than the batch, with their default ranges.

    By default a sequence may be shorter than in the calibration data, but an image may not be
    smaller, because few sizes fit a network's strides.
    """
    found: dict[str, SizeRange] = {}
    for spec in manifest.inputs:
        shape = manifest.calibration.sample_shapes[spec.name]
        for name, size in zip(spec.shape[1:], shape, strict=True):
            if isinstance(name, str) and name != spec.shape[0]:
                found[name] = SizeRange(1 if len(spec.shape) <= 3 else size, size)
    return found


def profile_sizes(
    manifest: Manifest, batches: Sequence[SizeRange], buckets: Mapping[str, Sequence[SizeRange]]
) -> tuple[Sizes, ...]:
    """Combine every batch range with every bucket; buckets are ranges of the model's other sizes.

    EngineOptionsError if a bucket names a size that the model does not have.
    """
    symbols = symbols_of(manifest)
    unknown = sorted(buckets.keys() - symbols.keys())
    if unknown:
        known = f"it has {', '.join(symbols)}" if symbols else "it has none"
        raise EngineOptionsError(
            f"--buckets: the model has no symbolic size {unknown[0]!r} besides the batch; {known} "
            f"({'; '.join(spec.describe() for spec in manifest.inputs)})"
        )
    choices = [buckets.get(name, (default,)) for name, default in symbols.items()]
    return tuple(
        Sizes(batch=batch, others=dict(zip(symbols, chosen, strict=True)))
        for batch in batches
        for chosen in itertools.product(*choices)
    )


def profile_notes(
    manifest: Manifest, sizes: Sequence[Sizes], buckets: Mapping[str, Sequence[SizeRange]]
) -> list[str]:
    """Return notes for the user about profiles that are going to be built."""
    notes = [
        f"{name}: engines take {describe_ranges([size])}, as the calibration data has it; "
        f"for others set --buckets {name}=SIZES"
        for name, size in symbols_of(manifest).items()
        if name not in buckets
    ]
    if len(sizes) > MANY_PROFILES:
        notes.append(
            f"{len(sizes)} profiles an engine are many: building takes long and serving needs "
            "memory for each; set fewer --batch-profiles or --buckets"
        )
    return notes


class ModelShapes:
    """Shapes of the model's inputs and cut tensors at given sizes, found by running the model.

    Shape inference is not used: it loses sizes at a ``Reshape``, and does not detect a table that
    is too short for a sequence. Running the model also finds sizes at which it fails, before
    anything is built.
    """

    def __init__(self, bundle: Bundle) -> None:
        manifest = bundle.manifest
        self._inputs = manifest.inputs
        # The full model after a variant is an engine of the whole bundle: it has no cuts.
        segments = manifest.segments[: manifest.source_begins] or manifest.segments
        self._cuts = tuple(name for s in segments for name in s.outputs)
        parts = [bundle.read(segment.file) for segment in segments]
        self._chain = onnx.load_from_string(assemble(parts, self._cuts))
        self._runner = GraphRunner(self._chain)
        self._known: dict[tuple[tuple[str, int], ...], dict[str, tuple[int, ...]]] = {}

    def at(self, point: Point) -> dict[str, tuple[int, ...]]:
        """Return shapes at a point, by tensor; EngineOptionsError if the model cannot run there."""
        if point.others not in self._known:
            self._known[point.others] = self._measure(point)
        cuts = {name: (point.batch, *rest) for name, rest in self._known[point.others].items()}
        return self.inputs_at(point) | cuts

    def inputs_at(self, point: Point) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the model's inputs at a point."""
        sizes = dict(point.others)
        return {
            spec.name: tuple(
                s if isinstance(s, int) else sizes.get(s, point.batch) for s in spec.shape
            )
            for spec in self._inputs
        }

    def _measure(self, point: Point) -> dict[str, tuple[int, ...]]:
        """Return the shapes of cut tensors without the batch dimension."""
        fixed = bound(self._chain, self.inputs_at(point._replace(batch=_PROBED_BATCH)))
        try:
            values = self._runner.run(random_inputs(fixed, _PROBED_BATCH))
        except RuntimeError as error:
            raise _impossible(point, str(error)) from error
        shapes = {name: values[name].shape for name in self._cuts}
        for name, shape in shapes.items():
            if not shape or shape[0] != _PROBED_BATCH or min(shape) < 1:
                raise _impossible(point, f"{name!r} is then {list(shape)}")
        return {name: shape[1:] for name, shape in shapes.items()}


def bound(proto: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]]) -> onnx.ModelProto:
    """Return a copy of a model whose inputs have fixed shapes."""
    copy = copied(proto)
    for info in copy.graph.input:
        if info.name in shapes:
            del info.type.tensor_type.shape.dim[:]
            for size in shapes[info.name]:
                info.type.tensor_type.shape.dim.add(dim_value=size)
    return copy


def unit_profiles(
    inputs: Iterable[str], sizes: Sequence[Sizes], shapes: ModelShapes
) -> tuple[SizedProfile, ...]:
    """Return the distinct profiles of a unit with these graph inputs.

    There may be fewer profiles than ``sizes``, because a unit may not depend on every size.
    """
    names = list(inputs)
    profiles: list[SizedProfile] = []
    for each in sizes:
        first, last = each.batch
        least, best = shapes.at(each.least), shapes.at(each.best)
        ranges = {n: ShapeRange(least=least[n], best=best[n], most=best[n]) for n in names}
        profile = ShapeProfile(first_batch=first, last_batch=last, inputs=ranges)
        if all(profile != known.shapes for known in profiles):
            profiles.append(SizedProfile(each, profile))
    return tuple(profiles)


def _impossible(point: Point, reason: str) -> EngineOptionsError:
    sizes = ", ".join(f"{name} {size}" for name, size in point.others)
    return EngineOptionsError(
        f"the model does not work with {sizes or 'a batch'}: {reason}; set the sizes that it "
        "accepts with --buckets NAME=SIZES, ranges such as 32-64 where small ones do not work"
    )
