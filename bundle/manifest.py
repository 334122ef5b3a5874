"""What a bundle contains: the schema of ``manifest.json``.

All classes are immutable facts. Names of tensors are those of the source model, which every
segment and exit shares, so that a stage is the plain union of its parts
(:mod:`offramp.engine.assembly`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

SCHEMA_VERSION = 1
"""Bumped whenever an older reader would misunderstand a newer bundle."""

AnswerForm: TypeAlias = Literal["logits", "probabilities"]
"""Whether the model ends before or after its softmax."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A named input or output of the model."""

    name: str
    dtype: str
    """numpy's name of the element type, for instance ``float32``."""
    shape: tuple[int | str, ...]
    """Sizes; a string is a symbolic size. The first one is the batch."""

    def __post_init__(self) -> None:
        dtype = np.dtype(self.dtype)
        if dtype.kind not in "biuf" or dtype.name != self.dtype:
            raise ValueError(f"dtype {self.dtype!r} is not numpy's name of a number type")
        if any(isinstance(size, int) and size < 0 for size in self.shape):
            raise ValueError(f"shape {list(self.shape)} has a negative size")

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
    """Share of the source model's floating-point operations, 0 to 1."""


HeadKind: TypeAlias = Literal["grid", "first", "mean", "mean_max", "attention", "vector"]
"""How a head pools: average to a grid; first token; masked mean; first, mean and max joined;
learned attention queries; not at all. :mod:`offramp.calibration.families` has a class for each."""


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

    def describe(self) -> str:
        """``4×4 grid, hidden 64``, for reports."""
        pooling = {
            "grid": f"{self.grid}×{self.grid} grid",
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
    """Largest relative difference between chained segments and source that was allowed."""
    files: tuple[FileEntry, ...] = ()

    def __post_init__(self) -> None:
        if not self.segments:
            raise ValueError("segments: a bundle needs at least one")
        for name, parts in (("segments", self.segments), ("exits", self.exits)):
            if [part.index for part in parts] != list(range(len(parts))):
                raise ValueError(f"{name}: indices must count from 0 in order")
        depths = [e.after_segment for e in self.exits]
        if depths != sorted(set(depths)) or any(d >= len(self.segments) - 1 for d in depths):
            raise ValueError(f"exits: after_segment {depths} must rise and stay before the last")
        if self.answer.output != self.segments[-1].output:
            raise ValueError(f"answer: {self.answer.output!r} is not the last segment's output")
