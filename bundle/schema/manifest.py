"""The content of a bundle: the schema of ``manifest.json``.

All classes are immutable facts. Names of tensors are those of the source model, which every
segment and exit shares, so that a stage is the plain union of its parts
(:mod:`offramp.engine.graphs.assembly`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from typing import Final, Literal, TypeAlias

import numpy as np

from offramp.bundle.schema.answers import (
    Answer,
    shape_of,
)
from offramp.bundle.schema.compilation import (
    BatchEffect,
    CpuFeatures,
    DistinctSamples,
    JointTraining,
    OperatorLibrary,
    SharingCost,
)
from offramp.bundle.schema.inputs import (
    MOST_SAMPLE_BYTES,
    Padding,
    TensorSpec,
    UnreadInput,
    ValueBound,
    check_paddings,
    check_value_bounds,
    declared_inputs,
)
from offramp.bundle.schema.parts import Exit, Segment, Variant, last_beginning
from offramp.bundle.schema.serde import LEFT_OUT, check_hash, check_numbers

SCHEMA_VERSION = 2
"""The only format that is written and read: bundles of any other are refused."""


BundlePrecision: TypeAlias = Literal["fp32", "int8"]
"""Precision of the segments that exits follow. ``int8`` is a cascade: the quantised model, cut into
segments, then the unmodified one as the last segment, which starts from the inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """A file of the bundle, with its size and hash."""

    path: str
    """Path relative to the bundle, with forward slashes."""
    size_bytes: int
    sha256: str
    filled_sha256: str = field(default="", metadata=LEFT_OUT)
    """Hash of a graph including the weights that it names in ``weights.bin``, if it names any. It
    does not depend on where the weights are."""

    def __post_init__(self) -> None:
        check_numbers(self, "size_bytes", least=0)
        check_hash(self.sha256)
        if self.filled_sha256:
            check_hash(self.filled_sha256)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The data that trained, tuned and certified the exits."""

    data_sha256: str
    train_samples: int
    tune_samples: int
    certify_samples: int
    sample_shapes: dict[str, tuple[int, ...]]
    """Shape of one sample of each input, without the batch; the model is warmed up with such
    samples."""
    reference_batch_size: int
    """Batch size of the profiled times from which the savings were predicted."""
    source_accuracy: float | None = None
    """Accuracy of the source model on the certify split, where there were labels."""
    answer_ranges: tuple[float, ...] = field(default=(), metadata=LEFT_OUT)
    """Smallest and largest value of the model's answers to the certify split, then of the exits'
    answers, if exits end with the model's operators (``Answer.tail``)."""
    random_inputs: bool = field(default=False, metadata=LEFT_OUT)
    """True if the samples were generated at random, in a dry run: nothing is certified."""
    distinct: DistinctSamples | None = field(default=None, metadata=LEFT_OUT)
    """Distinct samples, each of which counts once; ``None`` if every row is a distinct sample. The
    tune and certify splits contain distinct samples, training all rows of their groups."""

    def describe_ranges(self) -> str:
        """Return ``the model's answers are from 0 to 100, those of exits from 0.1 to 100``."""
        least, most, least_early, most_early = self.answer_ranges
        return (
            f"the model's answers are from {least:.3g} to {most:.3g}, those of exits from "
            f"{least_early:.3g} to {most_early:.3g}"
        )

    def __post_init__(self) -> None:
        if len(self.answer_ranges) not in (0, 4):
            raise ValueError(
                f"calibration.answer_ranges: {len(self.answer_ranges)} numbers, expected 4 or none"
            )
        check_numbers(self, "train_samples", "tune_samples", "certify_samples", least=0)
        check_numbers(self, "reference_batch_size", least=1)
        check_numbers(self, "source_accuracy", least=0, most=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The unmodified model."""

    file: str
    original_name: str
    original_sha256: str
    """Hash of the user's file; the bundle contains a simplified, equivalent model."""
    opset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Content of ``manifest.json``: everything about a bundle except its graphs and records."""

    schema_version: int = SCHEMA_VERSION
    name: str
    created_utc: str
    tools: dict[str, str]
    """Versions of the tools that wrote the bundle."""
    source: Source
    inputs: tuple[TensorSpec, ...]
    """Inputs that the model reads, in the order of its file."""
    outputs: tuple[TensorSpec, ...]
    answer: Answer
    segments: tuple[Segment, ...]
    exits: tuple[Exit, ...]
    """All exits that were built, in depth order, whether the policy uses them or not."""
    calibration: Calibration
    verified_tolerance: float
    """Largest allowed relative difference between chained segments and the model that was cut into
    them (the source, or the quantised model)."""
    files: tuple[FileEntry, ...] = ()
    precision: BundlePrecision = field(default="fp32", metadata=LEFT_OUT)
    cpu: CpuFeatures | None = field(default=None, metadata=LEFT_OUT)
    """CPU that computed the answers that an int8 bundle was certified on; ``None`` in bundles of
    fp32."""
    weights_of_7_bits: bool = field(default=False, metadata=LEFT_OUT)
    """True if int8 weights are within −64 and 64, so that sums of their products do not overflow on
    any CPU."""
    precision_reason: str = field(default="", metadata=LEFT_OUT)
    """Reason for this precision, or these weights, where the compiler tried others."""
    training: JointTraining | None = field(default=None, metadata=LEFT_OUT)
    """Joint training of the copy that exits follow; with it the bundle is a cascade
    (:attr:`is_cascade`)."""
    batch_effect: BatchEffect | None = field(default=None, metadata=LEFT_OUT)
    """Effect of batches on the model's answers, where it is quantised dynamically."""
    custom_ops: tuple[OperatorLibrary, ...] = field(default=(), metadata=LEFT_OUT)
    """Libraries with operators of the graphs that ONNX Runtime does not have."""
    paddings: tuple[Padding, ...] = field(default=(), metadata=LEFT_OUT)
    """Symbolic sizes in which samples may be padded, so that they can share a batch."""
    value_bounds: tuple[ValueBound, ...] = field(default=(), metadata=LEFT_OUT)
    """Values beyond which the model fails: requests with others are refused."""
    subnet: str = field(default="", metadata=LEFT_OUT)
    """Name of the source model's subnet that exits follow; empty if they follow the whole model."""
    variants: tuple[Variant, ...] = field(default=(), metadata=LEFT_OUT)
    """Subnets that may serve in place of the model (SuperServe 3); variant 0 is the model."""
    weight_sharing: tuple[SharingCost, ...] = field(default=(), metadata=LEFT_OUT)
    """Costs of sharing weights in memory between sessions, for the model and each variant, by
    number; empty where they were not measured."""
    idle_reason: str = field(default="", metadata=LEFT_OUT)
    """Limit that keeps every exit out of use, and what would remove it; empty if an exit is in
    use."""
    unread: tuple[UnreadInput, ...] = field(default=(), metadata=LEFT_OUT)
    """Inputs that the file declares and no operator reads, by rising :attr:`UnreadInput.place`."""
    no_batching: str = field(default="", metadata=LEFT_OUT)
    """Reason why each sample must run in a separate batch; empty where samples may share one. Such
    a model has no exits."""

    def __post_init__(self) -> None:
        if not self.segments:
            raise ValueError("segments: a bundle needs at least one")
        for name, parts in (("segments", self.segments), ("exits", self.exits)):
            if [part.index for part in parts] != list(range(len(parts))):
                raise ValueError(f"{name}: indices must count from 0 in order")
        depths = [e.after_segment for e in self.exits]
        if depths != sorted(set(depths)) or any(
            not 0 <= d < len(self.segments) - 1 for d in depths
        ):
            raise ValueError(
                f"exits: after_segment {depths} must increase and be below the last segment"
            )
        if self.answer.output != self.segments[-1].output:
            raise ValueError(f"answer: {self.answer.output!r} is not the last segment's output")
        check_numbers(self, "verified_tolerance", least=0)
        _check_plain(self)
        _check_places(self)
        _check_unique("inputs", (tensor.name for tensor in self.declared))
        _check_unique("files", (entry.path for entry in self.files))
        _check_answer(self)
        _check_samples(self.inputs, self.calibration)
        check_paddings(self.paddings, self.inputs)
        check_value_bounds(self.value_bounds, self.inputs)
        _check_precision(self)
        _check_chain(self)
        _check_variants(self)
        _check_sharing(self)
        if last := self.segments[-1].row_bytes:
            raise ValueError(f"segments: row_bytes of the last segment is {last}, expected 0")

    @property
    def declared(self) -> tuple[TensorSpec, ...]:
        """All inputs of the model's file, in its order; clients and data may send any of them."""
        return declared_inputs(self.inputs, self.unread)

    @property
    def served_outputs(self) -> tuple[TensorSpec, ...]:
        """Outputs in the form of the model's file, which clients receive."""
        if not self.answer.flat:
            return self.outputs
        return tuple(replace(output, shape=output.shape[:1]) for output in self.outputs)

    @property
    def unread_names(self) -> frozenset[str]:
        """Names of the inputs that no operator reads."""
        return frozenset(each.spec.name for each in self.unread)

    @property
    def graphs(self) -> tuple[str, ...]:
        """Files that are graphs, including those of all variants, each once."""
        segments, exits = [*self.segments], [*self.exits]
        for variant in self.variants:
            segments += variant.segments
            exits += variant.exits
        files = (self.source.file, *(s.file for s in segments), *(e.file for e in exits))
        return tuple(dict.fromkeys(files))

    @property
    def is_cascade(self) -> bool:
        """True if exits follow a copy of the model, and the last segment is the model itself."""
        return self.precision != "fp32" or self.training is not None or bool(self.subnet)

    @property
    def is_plain(self) -> bool:
        """True if the bundle was made from the model alone, without data: it has no exits."""
        return self.calibration.train_samples == 0 and not self.exits

    @property
    def source_begins(self) -> int:
        """Index of the segment that the source model begins with: 0, or the last in a cascade."""
        return last_beginning(self.segments)

    def of_variant(self, number: int) -> Manifest:
        """Return the manifest of one of the variants, with the variant's segments and exits."""
        if number == 0:
            return self
        variant = self.variants[number - 1]
        return replace(
            self,
            segments=variant.segments,
            exits=variant.exits,
            subnet=variant.name,
            training=None,
            variants=(),
            weight_sharing=(),
        )


_NAMED: Final = 4
"""Largest number of tensors that a message names."""


def _check_unique(what: str, names: Iterable[str]) -> None:
    """Check that no name occurs twice; ``what`` is for the message."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"{what}: {name!r:.100} occurs twice")
        seen.add(name)


def _check_places(manifest: Manifest) -> None:
    """Check that places of inputs that no operator reads rise, and are indices of all inputs."""
    places = [each.place for each in manifest.unread]
    end = len(manifest.inputs) + len(places)
    if places != sorted(set(places)) or any(not 0 <= place < end for place in places):
        raise ValueError(
            f"unread: places {places!s:.100}, expected rising indices among all inputs, 0 to "
            f"{end - 1}"
        )


def _check_answer(manifest: Manifest) -> None:
    """Check that the answer is the only output, of the shape and type of its task."""
    answer, outputs = manifest.answer, manifest.outputs
    if [output.name for output in outputs] != [answer.output]:
        raise ValueError(
            f"outputs: {[output.name for output in outputs]!s:.100}, expected only the answer "
            f"{answer.output!r}"
        )
    (output,) = outputs
    if answer.task.kind == "other":
        if not (output.shape and isinstance(output.shape[0], str)):
            raise ValueError(f"outputs: {output.describe()} does not begin with the batch")
        return
    expected = shape_of(answer)
    fits = (
        len(output.shape) == len(expected)
        and isinstance(output.shape[0], str)
        and all(e is None or s == e for s, e in zip(output.shape[1:], expected[1:], strict=True))
    )
    is_number = output.dtype[0] in ("iu" if answer.form == "classes" else "f")
    if not (fits and is_number):
        sizes = ", ".join(str(e or "…") for e in expected[1:])
        kind = "integer" if answer.form == "classes" else "floating-point"
        raise ValueError(f"outputs: {output.describe()} is not {kind} [batch, {sizes}]")
    mask = answer.task.mask
    if mask is None:
        return
    shapes = {tensor.name: tensor.shape for tensor in manifest.inputs}
    if mask not in shapes or len(shapes[mask]) != 2 or shapes[mask][1] != output.shape[1]:
        raise ValueError(
            f"answer.task.mask: {mask!r:.100} is not an input [batch, {output.shape[1]}], expected "
            "one that marks the tokens of the answer that count"
        )


def _check_plain(manifest: Manifest) -> None:
    """Check that a model whose samples cannot be batched or imitated has no exits."""
    if not manifest.exits:
        return
    if manifest.no_batching:
        raise ValueError(f"no_batching: {manifest.no_batching!r:.100}, expected no exits with it")
    if manifest.answer.task.kind == "other":
        raise ValueError("answer.task: kind 'other' is for models without exits")


def _check_samples(inputs: Sequence[TensorSpec], calibration: Calibration) -> None:
    """Check that ``calibration`` has a sample shape that fits for each input."""
    shapes = calibration.sample_shapes
    names = sorted(tensor.name for tensor in inputs)
    if not names or sorted(shapes) != names:
        raise ValueError(
            f"calibration.sample_shapes: has {sorted(shapes)!s:.100}, expected the inputs {names}"
        )
    for tensor in inputs:
        shape, (batch, *sizes) = shapes[tensor.name], tensor.shape or (None,)
        fits = len(shape) == len(sizes) and all(
            found >= 1 if isinstance(size, str) else found == size
            for found, size in zip(shape, sizes, strict=True)
        )
        if not isinstance(batch, str) or not fits:
            raise ValueError(
                f"calibration.sample_shapes: {list(shape)!s:.100} is not a sample of the input "
                f"{tensor.describe()}"
            )
        if prod(shape) * np.dtype(tensor.dtype).itemsize > MOST_SAMPLE_BYTES:
            raise ValueError(f"calibration.sample_shapes: {list(shape)!s:.100} is above 1 GiB")


def _check_precision(manifest: Manifest) -> None:
    """Check that a cascade, and no other bundle, has a cascade's last segment and last exit."""
    last = len(manifest.segments) - 1
    own = [e.index for e in manifest.exits if e.head.kind == "own"]
    if manifest.training is not None and manifest.precision != "fp32":
        raise ValueError(f"training: is for precision fp32, not for {manifest.precision}")
    if not manifest.is_cascade:
        if own:
            raise ValueError(f"exits[{own[0]}]: head 'own' is for precision int8, not for fp32")
        return
    what = _copy_of(manifest)
    if not last:
        raise ValueError(
            f"segments: {what} needs at least two: one of the copy, and the source model"
        )
    if manifest.segments[last].file != manifest.source.file:
        raise ValueError(
            f"segments[{last}]: file {manifest.segments[last].file!r:.100}, expected the source "
            f"model {manifest.source.file!r:.100}, which {what} ends with"
        )
    end = len(manifest.exits) - 1
    if own != [end] or manifest.exits[end].after_segment != last - 1:
        raise ValueError(
            f"exits: {what} needs the copy's own answer, head 'own', as the last exit, after "
            f"segment {last - 1}; found {own} of {len(manifest.exits)}"
        )
    if manifest.training is not None:
        _check_trained(manifest.training, len(manifest.exits))


def _copy_of(manifest: Manifest) -> str:
    """Return the name of the property that makes a manifest a cascade."""
    if manifest.subnet:
        return f"subnet {manifest.subnet!r:.100}"
    return f"precision {manifest.precision}" if manifest.training is None else "joint training"


def _check_trained(training: JointTraining, exits: int) -> None:
    for epoch in training.epochs:
        if len(epoch.losses) != exits:
            raise ValueError(
                f"training: {len(epoch.losses)} answers were judged, expected one for each of the "
                f"{exits} exits"
            )


def _check_variants(manifest: Manifest) -> None:
    """Check that each variant is complete, and that its files are in its folder."""
    if [variant.index for variant in manifest.variants] != [*range(1, len(manifest.variants) + 1)]:
        raise ValueError("variants: indices must count from 1 in order")
    _check_unique("variants", (variant.name for variant in manifest.variants))
    for variant in manifest.variants:
        where = f"variants[{variant.index - 1}]"
        files = [s.file for s in variant.segments[:-1]] + [e.file for e in variant.exits]
        for file in files:
            if not file.startswith(variant.folder):
                raise ValueError(f"{where}: file {file!r:.100} is not under {variant.folder}")
        _check_unique(f"{where}.files", files)
        try:
            manifest.of_variant(variant.index)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error


def _check_sharing(manifest: Manifest) -> None:
    """Check that the model and all variants have costs of sharing weights, or that none has."""
    said = [cost.variant for cost in manifest.weight_sharing]
    if said and said != [*range(len(manifest.variants) + 1)]:
        raise ValueError(
            f"weight_sharing: has variants {said!s:.100}, expected one for each from 0 to "
            f"{len(manifest.variants)}, in order"
        )


def _check_chain(manifest: Manifest) -> None:
    """Check that each segment and exit reads graph inputs and outputs of earlier segments only.

    Every output of a segment must be read by a later segment. In a cascade, the segments before the
    source model are an exception: the source model reads only graph inputs, so perhaps only exits
    read the outputs of these segments.
    """
    graph_inputs = {tensor.name for tensor in manifest.inputs}
    source_start = len(manifest.segments) - 1 if manifest.is_cascade else 0
    alive: list[tuple[str, ...]] = []
    """Cut tensors that exist when each segment begins."""
    given: tuple[str, ...] = ()
    for segment in manifest.segments:
        if segment.index == source_start:
            given = ()
        alive.append(given)
        _check_reads(f"segments[{segment.index}]", segment.inputs, given, graph_inputs)
        given = (*given, *segment.outputs)
    for exit_ in manifest.exits:
        behind = exit_.after_segment
        given = (*alive[behind], *manifest.segments[behind].outputs)
        _check_reads(f"exits[{exit_.index}]", exit_.inputs, given, graph_inputs)
    read = {name for segment in manifest.segments for name in segment.inputs}
    for before, after in pairwise(manifest.segments):
        unread = [name for name in before.outputs if name not in read]
        if unread and after.index != source_start:
            _refuse_reads(f"segments[{after.index}]", after.inputs, unread)
    written = [name for segment in manifest.segments for name in segment.outputs]
    written += [name for exit_ in manifest.exits for name in (exit_.output, exit_.confidence)]
    _check_unique("tensors", [*(tensor.name for tensor in manifest.declared), *written])


def _check_reads(
    what: str, read: Sequence[str], given: Sequence[str], graph_inputs: set[str]
) -> None:
    if set(read) - graph_inputs - set(given) or not read:
        _refuse_reads(what, read, given)
    _check_unique(f"{what}.inputs", read)


def _refuse_reads(what: str, read: Sequence[str], given: Sequence[str]) -> None:
    cuts = " or ".join(map(repr, given[-_NAMED:]))
    expected = f"{cuts:.100}, and further graph inputs" if given else "graph inputs"
    raise ValueError(f"{what}: reads {list(read)!s:.200}, expected {expected}")
