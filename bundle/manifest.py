"""What a bundle contains: the schema of ``manifest.json``.

All classes are immutable facts. Names of tensors are those of the source model, which every
segment and exit shares, so that a stage is the plain union of its parts
(:mod:`offramp.engine.assembly`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Final, Literal, TypeAlias

import numpy as np

from offramp.bundle.batch_effect import BatchEffect
from offramp.bundle.cpu import CpuFeatures
from offramp.bundle.criteria import LEARNED_WEIGHTS, PROBABILITY, Criterion
from offramp.bundle.custom_ops import OperatorLibrary
from offramp.bundle.file_entry import FileEntry
from offramp.bundle.joint_training import JointTraining
from offramp.bundle.manifest_checks import (
    MOST_SAMPLE_BYTES,
    check_answer,
    check_chain,
    check_precision,
    check_samples,
    check_unique,
)
from offramp.bundle.padding import Padding, check_paddings
from offramp.bundle.serde import LEFT_OUT, check_numbers
from offramp.bundle.tasks import CLASSIFICATION, AnswerTask, TaskKind

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
``values`` are what regression answers, and heat maps."""

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


_COUNTED: Final[dict[TaskKind, str]] = {
    "classification": "classes",
    "multi-label": "labels",
    "token-classification": "classes",
    "segmentation": "classes",
    "pose": "key points",
    "regression": "values",
}
_SCORES: Final[tuple[AnswerForm, ...]] = ("logits", "probabilities", "log-probabilities")
_FORMS: Final[dict[TaskKind, tuple[AnswerForm, ...]]] = {
    "classification": _SCORES,
    "multi-label": ("logits", "probabilities"),
    "token-classification": (*_SCORES, "classes"),
    "segmentation": (*_SCORES, "classes"),
    "pose": ("values",),
    "regression": ("values",),
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

    def __post_init__(self) -> None:
        check_numbers(self, "classes", least=1)
        if self.form not in _FORMS[self.task.kind]:
            known = ", ".join(_FORMS[self.task.kind])
            raise ValueError(f"form {self.form!r} is none of {self.task.kind}: {known}")
        if self.tokens and len(self.tokens) != self.classes:
            raise ValueError(
                f"answer.tokens: {len(self.tokens)} ids, expected one for each of the "
                f"{self.classes} classes"
            )
        if self.criterion != PROBABILITY and self.task.kind != "classification":
            raise ValueError(
                f"criterion {self.criterion.name} is for classification, not for {self.task.kind}"
            )

    def describe(self) -> str:
        """``10 classes, logits``, for people."""
        what = _COUNTED[self.task.kind]
        if self.task.is_dense:
            what += f" ({self.task.kind})"
        form = f", {self.form}" if self.form != "values" else ""
        judged = f", exits by {self.criterion.name}" if self.criterion != PROBABILITY else ""
        return f"{self.classes} {what}{form}{judged}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The blocks between two neighbouring candidate cut points."""

    index: int
    file: str
    inputs: tuple[str, ...]
    """Tensors read: cut tensors, then the graph inputs needed beside them."""
    output: str
    """The cut tensor, or the model's answer in the last segment."""
    also: tuple[str, ...] = field(default=(), metadata=LEFT_OUT)
    """Further tensors that it writes and that are carried on, where the cut is a set of tensors."""
    flops_share: float
    """Share of the source model's floating-point operations, 0 to 1 (of the time of its operators,
    where their number is not known); of a quantised segment, that of what it stands for."""

    def __post_init__(self) -> None:
        check_numbers(self, "flops_share", least=0, most=1 + 1e-6)

    @property
    def outputs(self) -> tuple[str, ...]:
        """All tensors that it writes: of a set cut, those that no segment before it wrote."""
        return (self.output, *self.also)


def last_beginning(segments: Sequence[Segment]) -> int:
    """Find the last place where segments read nothing of those before: what follows begins there.

    That is 0, but in a cascade, where the source model is the last segment.
    """
    first_written = {name: s.index for s in segments for name in s.outputs}
    reaching = len(segments)
    for segment in reversed(segments):
        read = (first_written.get(name, segment.index) for name in segment.inputs)
        reaching = min(reaching, segment.index, *read)
        if reaching == segment.index:
            return segment.index
    return 0


def given_behind(segments: Sequence[Segment], first: int, last: int) -> tuple[str, ...]:
    """List what the segments from ``first`` to ``last`` give to those behind, or their answer."""
    read = {name for segment in segments[last + 1 :] for name in segment.inputs}
    written = [name for segment in segments[first : last + 1] for name in segment.outputs]
    return tuple(name for name in written if name in read) or (segments[last].output,)


HeadKind: TypeAlias = Literal[
    "grid", "first", "last", "mean", "mean_max", "attention", "vector", "joined", "own", "bridge"
]
"""How a head pools: average a map to a grid; first token; last one that counts; masked mean; first,
mean and max joined; learned attention queries; not at all; each tensor of a cut set, joined.
:mod:`offramp.calibration.families` has a class for each. ``own`` is no head: the answer of a
cascade's copy itself, after its last segment. ``bridge`` pools nothing: some blocks of the model,
then its own head."""


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
            return "the copy's own answer"
        if self.kind == "bridge":
            return "bridge"
        grid = "×".join([str(self.grid)] * self.axes)
        pooling = {
            "joined": "all tensors",
            "grid": f"{grid} grid" if self.axes > 1 else f"grid of {grid}",
            "first": "first token",
            "last": "last token",
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
    share: float = field(default=1.0, metadata=LEFT_OUT)
    """Of the answer's principal values, so many are at least as large as its confidence (PAME's
    count threshold, 5.3); of one principal value, all."""
    certainty: tuple[float, ...] = field(default=(), metadata=LEFT_OUT)
    """Weights of the criterion ``learned``: of the log-odds of largest probability, margin and
    1 − relative entropy, and a constant."""
    trials: tuple[HeadScore, ...] = ()
    """The heads that were trained to the end; the chosen one is among them."""

    def __post_init__(self) -> None:
        check_numbers(self, "agreement", "accuracy", least=0, most=1)
        check_numbers(self, "share", above=0, most=1)
        if len(self.certainty) not in (0, LEARNED_WEIGHTS):
            raise ValueError(f"certainty: {len(self.certainty)} weights, expected 0 or 4")


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
        check_unique("inputs", (tensor.name for tensor in self.inputs))
        check_unique("files", (entry.path for entry in self.files))
        check_answer(self)
        check_samples(self.inputs, self.calibration)
        check_paddings(self.paddings, self.inputs)
        check_precision(self)
        check_chain(self)

    @property
    def graphs(self) -> tuple[str, ...]:
        """The files that are graphs, each once."""
        parts = (*(s.file for s in self.segments), *(e.file for e in self.exits))
        return tuple(dict.fromkeys((self.source.file, *parts)))

    @property
    def is_cascade(self) -> bool:
        """Whether exits follow a copy of the source model, which stands behind it."""
        return self.precision != "fp32" or self.training is not None

    @property
    def source_begins(self) -> int:
        """Index of the segment that the source model begins with: 0, or the last in a cascade."""
        return last_beginning(self.segments)
