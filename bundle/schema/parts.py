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
    """Tensors read: cut tensors, then the graph inputs needed beside them."""
    output: str
    """The cut tensor, or the model's answer in the last segment."""
    also: tuple[str, ...] = field(default=(), metadata=LEFT_OUT)
    """Further tensors that it writes and that are carried on, where the cut is a set of tensors."""
    flops_share: float
    """Share of the source model's floating-point operations, 0 to 1 (of the time of its operators,
    where their number is not known); of a quantised segment, that of what it stands for."""
    row_bytes: int = 0
    """Bytes of a row that cross the border behind it, at the shapes of the calibration data: cut
    tensors and graph inputs that what follows reads; 0 behind the last."""
    weight_bytes: int = 0
    """Bytes of its weights, and of those of the exit that follows it."""

    def __post_init__(self) -> None:
        check_numbers(self, "flops_share", least=0, most=1 + 1e-6)
        check_numbers(self, "row_bytes", "weight_bytes", least=0)

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
    "grid", "first", "last", "mean", "attention", "vector", "joined", "own", "bridge"
]
"""How a head pools: average a map to a grid; first token; last one that counts; masked mean;
learned attention queries; not at all; each tensor of a cut set, joined.
:mod:`offramp.calibration.heads.families` has a class for each but the last two. ``own`` is no head:
the answer of a cascade's copy itself, after its last segment. ``bridge`` pools nothing: some blocks
of the model, then its own head."""


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


VARIANTS: Final = "variants"
"""Folder of a bundle with a folder of each variant, by its number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A subnet of the model, which shares its weights (SuperServe 3), and its own exits.

    It is built as a cascade is: exits follow the subnet's segments, its own answer is the last of
    them, and the unmodified model is the last segment. Batches that run it end at its own answer;
    audits run on.
    """

    index: int
    """From 1; 0 is the full model."""
    name: str
    """What it keeps of the model, as in ``depth 5 of 7, width 0.5``."""
    segments: tuple[Segment, ...]
    """The subnet's, then the unmodified model."""
    exits: tuple[Exit, ...]
    """In depth order; the last is the subnet's own answer."""

    def __post_init__(self) -> None:
        check_numbers(self, "index", least=1)
        if not self.name:
            raise ValueError("name: a variant needs one")

    @property
    def folder(self) -> str:
        """Where in the bundle its files are, with a slash at the end."""
        return folder_of(self.index)

    @property
    def agreement(self) -> float:
        """Share of the certify split that the whole subnet answers like the unmodified model."""
        return self.exits[-1].agreement


def folder_of(variant: int) -> str:
    """Give the folder of a variant's files, with a slash at the end; of the full model, none."""
    return f"{VARIANTS}/{variant}/" if variant else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSizes:
    """Bytes of what crosses borders between segments, and of weights."""

    row_bytes: tuple[int, ...]
    """[segments - 1]: of a row that crosses the border behind each segment."""
    weight_bytes: tuple[int, ...]
    """[segments]: of the weights of each, and of the exit that follows it."""

    @staticmethod
    def kept_by(segments: Sequence[Segment]) -> PartSizes:
        """Return the sizes that the segments of a manifest have."""
        return PartSizes(
            row_bytes=tuple(s.row_bytes for s in segments[:-1]),
            weight_bytes=tuple(s.weight_bytes for s in segments),
        )
