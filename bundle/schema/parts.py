"""The parts of a model in a bundle: segments, exits with their heads, and variants of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from offramp.bundle.schema.answers import LEARNED_WEIGHTS
from offramp.bundle.schema.serde import LEFT_OUT, check_numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The blocks between two neighbouring candidate cut points."""

    index: int
    file: str
    inputs: tuple[str, ...]
    """Tensors that the segment reads: cut tensors, then further graph inputs."""
    output: str
    """Name of the cut tensor, or of the model's answer in the last segment."""
    also: tuple[str, ...] = field(default=(), metadata=LEFT_OUT)
    """Further tensors that the segment writes for later segments, where the cut is a set of
    tensors."""
    flops_share: float
    """Share of the source model's floating-point operations, 0 to 1; where their number is not
    known, share of the operators' time. For a quantised segment, the share of the original
    segment."""
    row_bytes: int = 0
    """Bytes of one row of the batch that later segments read after this one (cut tensors and graph
    inputs), at the shapes of the calibration data; 0 in the last segment."""
    weight_bytes: int = 0
    """Bytes of the weights of the segment, and of the exit that follows it."""

    def __post_init__(self) -> None:
        check_numbers(self, "flops_share", least=0, most=1 + 1e-6)
        check_numbers(self, "row_bytes", "weight_bytes", least=0)

    @property
    def outputs(self) -> tuple[str, ...]:
        """All tensors that the segment writes, except those that earlier segments wrote."""
        return (self.output, *self.also)


def last_beginning(segments: Sequence[Segment]) -> int:
    """Return the last segment from which on no segment reads a tensor of an earlier one.

    It is 0 except in a cascade, where the source model is the last segment.
    """
    first_written = {name: s.index for s in segments for name in s.outputs}
    reaching = len(segments)
    for segment in reversed(segments):
        read = (first_written.get(name, segment.index) for name in segment.inputs)
        reaching = min(reaching, segment.index, *read)
        if reaching == segment.index:
            return segment.index
    return 0


def outputs_after(segments: Sequence[Segment], first: int, last: int) -> tuple[str, ...]:
    """Return the tensors of segments ``first`` to ``last`` that later segments read.

    If later segments read none of them, the result is the output of segment ``last``.
    """
    read = {name for segment in segments[last + 1 :] for name in segment.inputs}
    written = [name for segment in segments[first : last + 1] for name in segment.outputs]
    return tuple(name for name in written if name in read) or (segments[last].output,)


HeadKind: TypeAlias = Literal[
    "grid", "first", "last", "mean", "attention", "vector", "joined", "own", "bridge"
]
"""Pooling of a head. ``grid`` averages a map to a grid; ``first`` takes the first token, ``last``
the last token that counts; ``mean`` is a masked mean; ``attention`` has learned queries; ``vector``
pools nothing; ``joined`` pools each tensor of a cut set and joins the results.
:mod:`offramp.calibration.heads.families` has a class for each but the last two. ``own`` is not a
head: it is the answer of a cascade's copy, after its last segment. ``bridge`` has no pooling: it is
some blocks of the model, then the model's head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The pooling of an exit's cut tensor, and the layers after it."""

    kind: HeadKind
    grid: int = 0
    """Side of the pooled map, for ``grid``."""
    queries: int = 0
    """Number of learned queries, for ``attention``."""
    hidden: int = 0
    """Width of the hidden layer; 0 is a linear head."""
    axes: int = field(default=2, metadata=LEFT_OUT)
    """Dimensions of the pooled map, for ``grid``: 1 of a signal, 2 of an image, 3 of a video."""

    def __post_init__(self) -> None:
        check_numbers(self, "grid", "queries", "hidden", least=0)
        check_numbers(self, "axes", least=1, most=3)

    def describe(self) -> str:
        """Return ``4×4 grid, hidden 64``, for reports."""
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
            "attention": f"attention, {self.queries} {'query' if self.queries == 1 else 'queries'}",
        }.get(self.kind, self.kind)
        return f"{pooling}, {f'hidden {self.hidden}' if self.hidden else 'linear'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadScore:
    """One head that was fully trained for an exit, and its results there."""

    head: Head
    agreement: float
    """Share of the tuning split answered like the source model if all samples exit here."""
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
    """Names of the cut tensor, then of the mask where the head pools tokens with one."""
    output: str
    """Name of the head's answer; shape and form are those of the model's answer."""
    confidence: str
    """Name of the answer's confidence, float32 [batch], which the same graph computes."""
    head: Head
    agreement: float
    """Share of the certify split answered like the source model if all samples exit here."""
    accuracy: float | None = None
    """Share of the certify split answered like the data's labels if all samples exit here; ``None``
    without labels."""
    share: float = field(default=1.0, metadata=LEFT_OUT)
    """Share of the answer's principal values that are at least as large as its confidence (PAME's
    count threshold, 5.3); 1 if there is one principal value."""
    certainty: tuple[float, ...] = field(default=(), metadata=LEFT_OUT)
    """Weights of the criterion ``learned``: one for each of the log-odds of largest probability,
    margin and 1 − relative entropy, then a constant."""
    trials: tuple[HeadScore, ...] = ()
    """Heads that were fully trained, including the chosen one."""

    def __post_init__(self) -> None:
        check_numbers(self, "agreement", "accuracy", least=0, most=1)
        check_numbers(self, "share", above=0, most=1)
        if len(self.certainty) not in (0, LEARNED_WEIGHTS):
            raise ValueError(f"certainty: {len(self.certainty)} weights, expected 0 or 4")


VARIANTS: Final = "variants"
"""Folder of a bundle with one folder for each variant, named by its number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A subnet of the model, which shares its weights (SuperServe 3), with its exits.

    It has the form of a cascade: exits follow the subnet's segments, the last exit is the subnet's
    answer, and the unmodified model is the last segment. Batches that run the variant end at the
    subnet's answer; audits run on to the end.
    """

    index: int
    """Number of the variant from 1; 0 is the full model."""
    name: str
    """Part of the model that it keeps, as in ``depth 5 of 7, width 0.5``."""
    segments: tuple[Segment, ...]
    """The subnet's segments, then the unmodified model."""
    exits: tuple[Exit, ...]
    """Exits in depth order; the last is the subnet's answer."""

    def __post_init__(self) -> None:
        check_numbers(self, "index", least=1)
        if not self.name:
            raise ValueError("name is empty; every variant needs one")

    @property
    def folder(self) -> str:
        """Folder of its files in the bundle, with a slash at the end."""
        return folder_of(self.index)

    @property
    def agreement(self) -> float:
        """Share of the certify split that the whole subnet answers like the unmodified model."""
        return self.exits[-1].agreement


def folder_of(variant: int) -> str:
    """Return the folder of a variant's files, with a slash at the end; empty for the full model."""
    return f"{VARIANTS}/{variant}/" if variant else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSizes:
    """Bytes of tensors that pass between segments, and of weights."""

    row_bytes: tuple[int, ...]
    """[segments - 1]: bytes of one row of the batch that pass from each segment to later ones."""
    weight_bytes: tuple[int, ...]
    """[segments]: bytes of the weights of each segment and of the exit that follows it."""

    @staticmethod
    def kept_by(segments: Sequence[Segment]) -> PartSizes:
        """Return the sizes of a manifest's segments."""
        return PartSizes(
            row_bytes=tuple(s.row_bytes for s in segments[:-1]),
            weight_bytes=tuple(s.weight_bytes for s in segments),
        )
