"""What a bundle contains: the schema of ``manifest.json``.

All classes are immutable facts. Names of tensors are those of the source model, which every
segment and exit shares, so that a stage is the plain union of its parts
(:mod:`offramp.engine.assembly`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Final, Literal, TypeAlias

import numpy as np

from offramp.bundle.batch_effect import BatchEffect
from offramp.bundle.cpu import CpuFeatures
from offramp.bundle.padding import Padding, check_paddings
from offramp.bundle.serde import LEFT_OUT, check_numbers

SCHEMA_VERSION = 1
"""Bumped whenever an older reader would misunderstand a newer bundle."""

AnswerForm: TypeAlias = Literal["logits", "probabilities", "log-probabilities"]
"""How the model ends: before its softmax, behind it, or behind the logarithm of that. A softmax
gives probabilities of both others: of log-probabilities, those that they are of."""

BundlePrecision: TypeAlias = Literal["fp32", "int8"]
"""What the segments that exits follow compute in. ``int8`` is a cascade: the quantised model, cut
into segments, then the unmodified one as the last segment, which begins anew."""
BUNDLE_PRECISIONS: Final[tuple[BundlePrecision, ...]] = ("fp32", "int8")

NUMBER_DTYPES: Final = frozenset(np.dtype(code).name for code in "?bhilqBHILQefd")
"""numpy's names of the element types that models may take and give."""
_MOST_SAMPLE_BYTES: Final = 2**30
"""Of a sample's input: more is no sample, but a way to exhaust memory."""
_SHA256: Final = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A named input or output of the model."""

    name: str
    dtype: str
    """numpy's name of the element type, for instance ``float32``."""
    shape: tuple[int | str, ...]
    """Sizes; a string is a symbolic size. The first one is the batch."""

    def __post_init__(self) -> None:
        if self.dtype not in NUMBER_DTYPES:
            raise ValueError(f"dtype {self.dtype!r:.50} is not numpy's name of a number type")
        sizes = [size for size in self.shape if isinstance(size, int)]
        if any(size < 0 for size in sizes):
            raise ValueError(f"shape {list(self.shape)!s:.100} has a negative size")
        if prod(sizes) * np.dtype(self.dtype).itemsize > _MOST_SAMPLE_BYTES:
            raise ValueError(f"shape {list(self.shape)!s:.100} is of more than 1 GiB a sample")

    def describe(self) -> str:
        """``image: uint8 [batch, 1, 28, 28]``, for messages."""
        return f"{self.name}: {self.dtype} [{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The output that exits imitate and that agreement is judged by."""

    output: str
    """Name of the model's output, shape [batch, classes]."""
    classes: int
    form: AnswerForm

    def __post_init__(self) -> None:
        check_numbers(self, "classes", least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The blocks between two neighbouring candidate cut points."""

    index: int
    file: str
    inputs: tuple[str, ...]
    """Tensors read: the previous cut tensor, then the graph inputs needed beside it."""
    output: str
    """The cut tensor, or the model's answer in the last segment."""
    flops_share: float
    """Share of the source model's floating-point operations, 0 to 1 (of the time of its operators,
    where their number is not known); of a quantised segment, that of what it stands for."""

    def __post_init__(self) -> None:
        check_numbers(self, "flops_share", least=0, most=1 + 1e-6)


def last_beginning(segments: Sequence[Segment]) -> int:
    """Find the last segment that reads nothing of the one before it: what follows begins there.

    That is 0, but in a cascade, where the source model is the last segment.
    """
    anew = [b.index for a, b in pairwise(segments) if a.output not in b.inputs]
    return max(anew, default=0)


HeadKind: TypeAlias = Literal["grid", "first", "mean", "mean_max", "attention", "vector", "own"]
"""How a head pools: average a map to a grid; first token; masked mean; first, mean and max joined;
learned attention queries; not at all. :mod:`offramp.calibration.families` has a class for each.
``own`` is no head: the answer of the quantised model itself, after its last segment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """How an exit pools its cut tensor, and the layers behind the pooling."""

    kind: HeadKind
    grid: int = 0
    """Side of the pooled map, for ``grid``."""
    queries: int = 0
    """Learned queries, for ``attention``."""
    hidden: int = 0
    """Width of the hidden layer; 0 is a linear head."""
    axes: int = field(default=2, metadata=LEFT_OUT)
    """Sides of the pooled map, for ``grid``: 1 of a signal, 2 of an image, 3 of a video."""

    def __post_init__(self) -> None:
        check_numbers(self, "grid", "queries", "hidden", least=0)
        check_numbers(self, "axes", least=1, most=3)

    def describe(self) -> str:
        """``4×4 grid, hidden 64``, for reports."""
        if self.kind == "own":
            return "the int8 model's own answer"
        grid = "×".join([str(self.grid)] * self.axes)
        pooling = {
            "grid": f"{grid} grid" if self.axes > 1 else f"grid of {grid}",
            "first": "first token",
            "mean_max": "first+mean+max",
            "attention": f"attention, {self.queries} {'query' if self.queries == 1 else 'queries'}",
        }.get(self.kind, self.kind)
        return f"{pooling}, {f'hidden {self.hidden}' if self.hidden else 'linear'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadScore:
    """One head that was trained for an exit to the end, and what it brought there."""

    head: Head
    agreement: float
    """Share of the tuning split answered like the source model if all exit here."""
    cost_ms: float
    """Measured time of the head alone, per batch of ``Calibration.reference_batch_size``."""
    net_savings: float
    """Share of the source model's time saved on the tuning split with this exit alone."""

    def __post_init__(self) -> None:
        check_numbers(self, "agreement", least=0, most=1)
        check_numbers(self, "cost_ms", least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """Bridge and head attached after a segment."""

    index: int
    after_segment: int
    file: str
    inputs: tuple[str, ...]
    """The cut tensor, then the mask where the head pools tokens with one."""
    output: str
    """Name of the head's answer; the shape and form are those of the model's answer."""
    confidence: str
    """Name of the answer's confidence, float32 [batch], which the same graph computes."""
    head: Head
    agreement: float
    """Share of the certify split answered like the source model if all exit here."""
    accuracy: float | None = None
    """The same against the labels of the data, where there were any."""
    trials: tuple[HeadScore, ...] = ()
    """The heads that were trained to the end; the chosen one is among them."""

    def __post_init__(self) -> None:
        check_numbers(self, "agreement", "accuracy", least=0, most=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The data that trained, tuned and certified the exits."""

    data_sha256: str
    train_samples: int
    tune_samples: int
    certify_samples: int
    sample_shapes: dict[str, tuple[int, ...]]
    """Shape of one sample of each input, without the batch: what the model is warmed up with."""
    reference_batch_size: int
    """Batch size whose profiled times the savings were predicted with."""
    source_accuracy: float | None = None
    """Accuracy of the source model on the certify split, where there were labels."""

    def __post_init__(self) -> None:
        check_numbers(self, "train_samples", "tune_samples", "certify_samples", least=0)
        check_numbers(self, "reference_batch_size", least=1)
        check_numbers(self, "source_accuracy", least=0, most=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The unmodified model."""

    file: str
    original_name: str
    original_sha256: str
    """Hash of the file that the user gave; the bundle holds a simplified, equal one."""
    opset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """A file of the bundle."""

    path: str
    """Relative to the bundle, with forward slashes."""
    size_bytes: int
    sha256: str

    def __post_init__(self) -> None:
        check_numbers(self, "size_bytes", least=0)
        if not _SHA256.fullmatch(self.sha256):
            raise ValueError(f"sha256 {self.sha256!r:.80} is not 64 hexadecimal digits")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """``manifest.json``."""

    schema_version: int
    name: str
    created_utc: str
    tools: dict[str, str]
    """Versions of what wrote the bundle."""
    source: Source
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    answer: Answer
    segments: tuple[Segment, ...]
    exits: tuple[Exit, ...]
    """All exits that were built, in depth order, whether the policy uses them or not."""
    calibration: Calibration
    verified_tolerance: float
    """Largest relative difference between chained segments and the model that was cut into them
    (the source, or the quantised model) that was allowed."""
    files: tuple[FileEntry, ...] = ()
    precision: BundlePrecision = field(default="fp32", metadata=LEFT_OUT)
    cpu: CpuFeatures | None = field(default=None, metadata=LEFT_OUT)
    """The CPU that gave the answers that an int8 bundle was certified on; ``None`` in bundles of
    fp32, and in older ones, where it was not kept."""
    precision_reason: str = field(default="", metadata=LEFT_OUT)
    """Why the compiler chose this precision, where it was asked to look at others."""
    batch_effect: BatchEffect | None = field(default=None, metadata=LEFT_OUT)
    """What the model answers otherwise in other batches, where it is quantised dynamically."""
    paddings: tuple[Padding, ...] = field(default=(), metadata=LEFT_OUT)
    """The symbolic sizes in which samples may be padded, so that they can share a batch."""

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
            raise ValueError(f"exits: after_segment {depths} must rise and stay before the last")
        if self.answer.output != self.segments[-1].output:
            raise ValueError(f"answer: {self.answer.output!r} is not the last segment's output")
        check_numbers(self, "verified_tolerance", least=0)
        _check_unique("inputs", (tensor.name for tensor in self.inputs))
        _check_unique("files", (entry.path for entry in self.files))
        _check_answer(self)
        _check_samples(self.inputs, self.calibration)
        check_paddings(self.paddings, self.inputs)
        _check_precision(self)
        _check_chain(self)

    @property
    def source_begins(self) -> int:
        """Index of the segment that the source model begins with: 0, or the last in a cascade."""
        return last_beginning(self.segments)


def _check_unique(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"{what}: {name!r:.100} is there twice")
        seen.add(name)


def _check_answer(manifest: Manifest) -> None:
    """The answer is the one output: floating-point, [batch, classes]."""
    answer, outputs = manifest.answer, manifest.outputs
    if [output.name for output in outputs] != [answer.output]:
        raise ValueError(
            f"outputs: {[output.name for output in outputs]!s:.100} are not the answer "
            f"{answer.output!r} alone"
        )
    (output,) = outputs
    batch_and_classes = len(output.shape) == 2 and isinstance(output.shape[0], str)
    if not batch_and_classes or output.shape[1] != answer.classes or output.dtype[0] != "f":
        raise ValueError(
            f"outputs: {output.describe()} is not floating-point [batch, {answer.classes}]"
        )


def _check_samples(inputs: Sequence[TensorSpec], calibration: Calibration) -> None:
    """There is a shape of a sample for each input, which the input takes."""
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
                f"calibration.sample_shapes: {list(shape)!s:.100} is no sample of the input "
                f"{tensor.describe()}"
            )
        if prod(shape) * np.dtype(tensor.dtype).itemsize > _MOST_SAMPLE_BYTES:
            raise ValueError(f"calibration.sample_shapes: {list(shape)!s:.100} is above 1 GiB")


def _check_precision(manifest: Manifest) -> None:
    """The last segment and the last exit of a cascade, and of no other, are what they must be."""
    is_cascade = manifest.precision != "fp32"
    last = len(manifest.segments) - 1
    own = [e.index for e in manifest.exits if e.head.kind == "own"]
    if not is_cascade:
        if own:
            raise ValueError(f"exits[{own[0]}]: head 'own' is for precision int8, not for fp32")
        return
    if not last:
        raise ValueError("segments: precision int8 needs a quantised one, and the source model")
    if manifest.segments[last].file != manifest.source.file:
        raise ValueError(
            f"segments[{last}]: file {manifest.segments[last].file!r:.100}, expected the source "
            f"model {manifest.source.file!r:.100}, which precision int8 ends with"
        )
    end = len(manifest.exits) - 1
    if own != [end] or manifest.exits[end].after_segment != last - 1:
        raise ValueError(
            f"exits: precision int8 needs the quantised model's own answer, head 'own', as the "
            f"last exit, after segment {last - 1}; found {own} of {len(manifest.exits)}"
        )


def _check_chain(manifest: Manifest) -> None:
    """Each segment reads what the one before it gives, and graph inputs; exits do likewise.

    The source model in a cascade reads graph inputs alone.
    """
    graph_inputs = {tensor.name for tensor in manifest.inputs}
    cut: str | None = None
    for segment in manifest.segments:
        if manifest.precision != "fp32" and segment is manifest.segments[-1]:
            cut = None
        _check_reads(f"segments[{segment.index}]", segment.inputs, cut, graph_inputs)
        cut = segment.output
    for exit_ in manifest.exits:
        cut = manifest.segments[exit_.after_segment].output
        _check_reads(f"exits[{exit_.index}]", exit_.inputs, cut, graph_inputs)
    given = [segment.output for segment in manifest.segments]
    given += [name for exit_ in manifest.exits for name in (exit_.output, exit_.confidence)]
    _check_unique("tensors", [*graph_inputs, *given])


def _check_reads(what: str, read: Sequence[str], cut: str | None, graph_inputs: set[str]) -> None:
    missing = cut is not None and cut not in read
    foreign = sorted(set(read) - graph_inputs - {cut})
    if missing or foreign or not read:
        expected = "graph inputs" if cut is None else f"{cut!r}, and graph inputs beside it"
        raise ValueError(f"{what}: reads {list(read)!s:.200}, expected {expected}")
    _check_unique(f"{what}.inputs", read)
