"""What a bundle contains: the schema of ``manifest.json``.

All classes are immutable facts. Names of tensors are those of the source model, which every
segment and exit shares, so that a stage is the plain union of its parts
(:mod:`offramp.engine.graphs.assembly`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offramp.bundle.schema.batch_effect import BatchEffect
from offramp.bundle.schema.cpu import CpuFeatures
from offramp.bundle.schema.criteria import PROBABILITY, Criterion
from offramp.bundle.schema.custom_ops import OperatorLibrary
from offramp.bundle.schema.distinct import DistinctSamples
from offramp.bundle.schema.file_entry import FileEntry
from offramp.bundle.schema.joint_training import JointTraining
from offramp.bundle.schema.manifest_checks import (
    MOST_SAMPLE_BYTES,
    check_answer,
    check_chain,
    check_places,
    check_plain,
    check_precision,
    check_samples,
    check_sharing,
    check_sizes,
    check_unique,
    check_variants,
)
from offramp.bundle.schema.padding import Padding, check_paddings
from offramp.bundle.schema.parts import Exit, Segment, Variant, last_beginning
from offramp.bundle.schema.serde import LEFT_OUT, check_numbers
from offramp.bundle.schema.tasks import CLASSIFICATION, AnswerTask, TaskKind
from offramp.bundle.schema.value_bounds import ValueBound, check_value_bounds
from offramp.bundle.schema.weight_sharing import SharingCost

SCHEMA_VERSION = 1
"""Bumped whenever an older reader would misunderstand a newer bundle."""
SCHEMA_OF_WEIGHTS = 2
"""Of bundles whose graphs name weights in ``weights.bin``: an older reader would hand such graphs
to runtimes as they are, which would look for that file in the folder they were started in."""
SCHEMAS_READ = (SCHEMA_VERSION, SCHEMA_OF_WEIGHTS)

AnswerForm: TypeAlias = Literal["logits", "probabilities", "log-probabilities", "classes", "values"]
"""How the model ends: before its softmax, behind it, or behind the logarithm of that. A softmax
gives probabilities of both others: of log-probabilities, those that they are of. (Of labels, which
are a yes or no each, it is a sigmoid.) ``classes`` are numbers of classes, for each token or pixel;
``values`` are what regression answers, heat maps, and scores of classes or labels on a scale of the
model's own, which no confidence can be read off."""

BundlePrecision: TypeAlias = Literal["fp32", "int8"]
"""What the segments that exits follow compute in. ``int8`` is a cascade: the quantised model, cut
into segments, then the unmodified one as the last segment, which begins anew."""

NUMBER_DTYPES: Final = frozenset(np.dtype(code).name for code in "?bhilqBHILQefd")
"""numpy's names of the element types that models may take and give."""


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
        if prod(sizes) * np.dtype(self.dtype).itemsize > MOST_SAMPLE_BYTES:
            raise ValueError(f"shape {list(self.shape)!s:.100} is of more than 1 GiB a sample")

    def describe(self) -> str:
        """``image: uint8 [batch, 1, 28, 28]``, for messages."""
        return f"{self.name}: {self.dtype} [{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadInput:
    """An input that the model's file declares and no operator reads.

    Requests and data may hold it or leave it out. Where it is there it is checked, then dropped.
    """

    spec: TensorSpec
    place: int
    """Index among all inputs that the file declares."""


def declared_inputs(
    read: Iterable[TensorSpec], unread: Iterable[UnreadInput]
) -> tuple[TensorSpec, ...]:
    """Return all inputs of a model's file in its order, those that nothing reads included."""
    declared = list(read)
    for each in unread:
        declared.insert(each.place, each.spec)
    return tuple(declared)


_COUNTED: Final[dict[TaskKind, str]] = {
    "classification": "classes",
    "multi-label": "labels",
    "token-classification": "classes",
    "segmentation": "classes",
    "pose": "key points",
    "regression": "values",
    "other": "values",
}
_SCORES: Final[tuple[AnswerForm, ...]] = ("logits", "probabilities", "log-probabilities")
_FORMS: Final[dict[TaskKind, tuple[AnswerForm, ...]]] = {
    "classification": (*_SCORES, "values"),
    "multi-label": ("logits", "probabilities", "values"),
    "token-classification": (*_SCORES, "classes"),
    "segmentation": (*_SCORES, "classes"),
    "pose": ("values",),
    "regression": ("values",),
    "other": ("values",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The output that exits imitate and that agreement is judged by."""

    output: str
    """Name of the model's output; of classification its shape is [batch, classes]."""
    classes: int
    """Classes, labels, key points or values, as the task has them."""
    form: AnswerForm
    task: AnswerTask = field(default=CLASSIFICATION, metadata=LEFT_OUT)
    tokens: tuple[int, ...] = field(default=(), metadata=LEFT_OUT)
    """Ids of the tokens that the classes are, in their order, where the model is a decoder that
    was reduced to them."""
    criterion: Criterion = field(default=PROBABILITY, metadata=LEFT_OUT)
    """What says how sure exits are of it; of other tasks than classification, probability."""
    flat: bool = field(default=False, metadata=LEFT_OUT)
    """Whether the model's file gives one number a sample, [batch]: that is what is served. The
    bundle's graphs give it as [batch, 1]."""
    tail: tuple[str, ...] = field(default=(), metadata=LEFT_OUT)
    """Operators that every exit ends with, as the model does, after its scores (Apparate 3.1)."""
    thresholds: tuple[float, ...] = field(default=(), metadata=LEFT_OUT)
    """Of labels, the values from which on each is given; none where the form says it."""

    def __post_init__(self) -> None:
        check_numbers(self, "classes", least=1)
        if self.form not in _FORMS[self.task.kind]:
            known = ", ".join(_FORMS[self.task.kind])
            raise ValueError(f"form {self.form!r} is none of {self.task.kind}: {known}")
        if self.flat and self.classes != 1:
            raise ValueError(f"flat is of one number a sample, not of {self.classes}")
        if self.tokens and len(self.tokens) != self.classes:
            raise ValueError(
                f"answer.tokens: {len(self.tokens)} ids, expected one for each of the "
                f"{self.classes} classes"
            )
        if self.thresholds and (
            self.task.kind != "multi-label" or len(self.thresholds) != self.classes
        ):
            raise ValueError(
                f"answer.thresholds: {len(self.thresholds)} of {self.task.kind}, expected one for "
                f"each of the {self.classes} labels of multi-label, or none"
            )
        if self.criterion != PROBABILITY and self.task.kind != "classification":
            raise ValueError(
                f"criterion {self.criterion.name} is for classification, not for {self.task.kind}"
            )

    def served(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return answers of graphs in the shape that the model's file has."""
        return values[:, 0] if self.flat else values

    def describe(self) -> str:
        """``10 classes, logits``, for people."""
        if self.task.kind == "other":
            return "numbers that no exit imitates"
        what = _COUNTED[self.task.kind]
        if self.task.is_dense:
            what += f" ({self.task.kind})"
        form = f", {self.form}" if self.form != "values" else ""
        judged = f", exits by {self.criterion.name}" if self.criterion != PROBABILITY else ""
        ended = f", then {', '.join(self.tail)}" if self.tail else ""
        return f"{self.classes} {what}{form}{ended}{judged}"


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
    answer_ranges: tuple[float, ...] = field(default=(), metadata=LEFT_OUT)
    """Smallest and largest value of the model's answers to the certify split, then of its exits',
    where these end with the model's own operators (``Answer.tail``)."""
    random_inputs: bool = field(default=False, metadata=LEFT_OUT)
    """Whether the samples were made at random, in a dry run: nothing is certified."""
    distinct: DistinctSamples | None = field(default=None, metadata=LEFT_OUT)
    """Distinct samples, of which each counts once; ``None`` where every row is one. The samples of
    the tune and certify splits are distinct ones, those of training all rows of their groups."""

    def describe_ranges(self) -> str:
        """``the model's answers are from 0 to 100, those of exits from 0.1 to 100``."""
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
    """Hash of the file that the user gave; the bundle holds a simplified, equal one."""
    opset: int


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
    """Inputs that the model reads, in the order of its file."""
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
    weights_of_7_bits: bool = field(default=False, metadata=LEFT_OUT)
    """Whether int8 weights are within −64 and 64, so that sums of their products overflow on no
    CPU."""
    precision_reason: str = field(default="", metadata=LEFT_OUT)
    """Why the compiler chose this precision, or these weights, where it looked at others."""
    training: JointTraining | None = field(default=None, metadata=LEFT_OUT)
    """How the copy that exits follow was trained together with them; then it is a cascade."""
    batch_effect: BatchEffect | None = field(default=None, metadata=LEFT_OUT)
    """What the model answers otherwise in other batches, where it is quantised dynamically."""
    custom_ops: tuple[OperatorLibrary, ...] = field(default=(), metadata=LEFT_OUT)
    """Libraries with operators of the graphs that ONNX Runtime does not have itself."""
    paddings: tuple[Padding, ...] = field(default=(), metadata=LEFT_OUT)
    """The symbolic sizes in which samples may be padded, so that they can share a batch."""
    value_bounds: tuple[ValueBound, ...] = field(default=(), metadata=LEFT_OUT)
    """The values beyond which the model fails: requests with others are refused."""
    subnet: str = field(default="", metadata=LEFT_OUT)
    """What the copy that exits follow keeps of the source model, where it is a subnet of it."""
    variants: tuple[Variant, ...] = field(default=(), metadata=LEFT_OUT)
    """Subnets that may serve in place of the model (SuperServe 3); variant 0 is the model."""
    weight_sharing: tuple[SharingCost, ...] = field(default=(), metadata=LEFT_OUT)
    """What sessions of the model and of each variant cost that share weights in memory, by number;
    empty where that was not measured."""
    idle_reason: str = field(default="", metadata=LEFT_OUT)
    """Which limit keeps all exits out of use, where none is in use, and what would lift it."""
    unread: tuple[UnreadInput, ...] = field(default=(), metadata=LEFT_OUT)
    """Inputs that the file declares and nothing reads, by rising place."""
    no_batching: str = field(default="", metadata=LEFT_OUT)
    """Reason why each sample has to run in a batch of its own; empty where samples may share one.
    Such a model has no exits."""

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
        check_plain(self)
        check_places(self)
        check_unique("inputs", (tensor.name for tensor in self.declared))
        check_unique("files", (entry.path for entry in self.files))
        check_answer(self)
        check_samples(self.inputs, self.calibration)
        check_paddings(self.paddings, self.inputs)
        check_value_bounds(self.value_bounds, self.inputs)
        check_precision(self)
        check_chain(self)
        check_variants(self)
        check_sharing(self)
        check_sizes(self.segments)

    @property
    def declared(self) -> tuple[TensorSpec, ...]:
        """All inputs of the model's file, in its order: what clients and data may hold."""
        return declared_inputs(self.inputs, self.unread)

    @property
    def served_outputs(self) -> tuple[TensorSpec, ...]:
        """Outputs as the model's file has them, and clients get them."""
        if not self.answer.flat:
            return self.outputs
        return tuple(replace(output, shape=output.shape[:1]) for output in self.outputs)

    @property
    def unread_names(self) -> frozenset[str]:
        """Names of the inputs that nothing reads."""
        return frozenset(each.spec.name for each in self.unread)

    @property
    def graphs(self) -> tuple[str, ...]:
        """The files that are graphs, each once, with those of all variants."""
        segments, exits = [*self.segments], [*self.exits]
        for variant in self.variants:
            segments += variant.segments
            exits += variant.exits
        files = (self.source.file, *(s.file for s in segments), *(e.file for e in exits))
        return tuple(dict.fromkeys(files))

    @property
    def is_cascade(self) -> bool:
        """Whether exits follow a copy of the source model, which stands behind it."""
        return self.precision != "fp32" or self.training is not None or bool(self.subnet)

    @property
    def is_plain(self) -> bool:
        """Whether the bundle was made of the model alone, without data: it has no exits."""
        return self.calibration.train_samples == 0 and not self.exits

    @property
    def source_begins(self) -> int:
        """Index of the segment that the source model begins with: 0, or the last in a cascade."""
        return last_beginning(self.segments)

    def of_variant(self, number: int) -> Manifest:
        """Give the manifest as one of its variants has it: with the segments and exits of that."""
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
