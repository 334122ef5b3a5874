"""What kinds of answers models give, and when two answers to one sample agree.

Exits, thresholds and promises know one thing about an answer: whether it agrees with the model's
own, yes or no. What that means is the task's. How sure an answer is, PAME 5.3 reads off its
*principal values*: a sample leaves when at least so many of them reach the threshold.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias, get_args

from offramp.bundle.schema.serde import LEFT_OUT, check_numbers

TaskKind: TypeAlias = Literal[
    "classification",
    "multi-label",
    "token-classification",
    "segmentation",
    "pose",
    "regression",
    "other",
]
"""By shape of the answer: [batch, classes]; [batch, labels]; [batch, tokens, classes]; [batch,
classes, height, width], or the classes of the pixels alone; [batch, key points, height, width];
[batch, values]; of any other shape and type, which no exit imitates."""
TASK_KINDS: Final[tuple[TaskKind, ...]] = tuple(k for k in get_args(TaskKind) if k != "other")
"""Kinds that exits can imitate, hence those that can be asked for."""
DENSE: Final[frozenset[TaskKind]] = frozenset({"token-classification", "segmentation", "pose"})
"""Tasks whose answer has places: tokens, pixels, or key points."""


WHOLE_SETS: Final = 31
"""Labels whose sets have a number each; sets of more are told apart by a checksum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerTask:
    """The kind of a model's answers, and what of them has to be equal for one sample to agree."""

    kind: TaskKind = "classification"
    share: float = field(default=1.0, metadata=LEFT_OUT)
    """Least share of tokens, pixels or key points that are equal, where there are any."""
    within: float = field(default=0.0, metadata=LEFT_OUT)
    """How far values may differ (regression), or key points be apart, as a share of the longer
    side of the map (pose)."""
    mask: str | None = field(default=None, metadata=LEFT_OUT)
    """Graph input [batch, tokens] that says which tokens count, for token classification."""

    def __post_init__(self) -> None:
        check_numbers(self, "share", above=0, most=1)
        check_numbers(self, "within", least=0)
        measured = self.kind in ("pose", "regression")
        if self.share != 1 and self.kind not in DENSE:
            raise ValueError(f"share is {self.share} for {self.kind}, which has no places")
        if self.within and not measured:
            raise ValueError(f"within is {self.within} for {self.kind}, which compares classes")
        if self.mask is not None and self.kind != "token-classification":
            raise ValueError(f"mask is {self.mask!r:.100} for {self.kind}, which has no tokens")

    @property
    def is_dense(self) -> bool:
        """Whether an answer has places."""
        return self.kind in DENSE

    @property
    def is_relative(self) -> bool:
        """Whether answers agree when they are near, so that equality says too little."""
        return self.is_dense or self.kind == "regression"

    def code_bound(self, classes: int) -> int:
        """Find the number that all codes of answers are below, of so many classes or labels."""
        if self.is_relative:
            return 2
        if self.kind == "classification":
            return classes
        return 1 << min(classes, WHOLE_SETS)

    def describe(self) -> str:
        """Say when an answer agrees, as in ``it agrees if …``."""
        part = "all" if self.share == 1 else f"at least {100 * self.share:g} % of the"
        match self.kind:
            case "classification":
                return "the class is the same"
            case "multi-label":
                return "all labels are the same"
            case "token-classification":
                return f"{part} tokens have the same class"
            case "segmentation":
                return f"{part} pixels have the same class"
            case "pose":
                where = f"within {100 * self.within:g} % of the map's longer side"
                return f"{part} key points are {where}"
            case "regression" | "other":
                return f"all values differ by at most {self.within:g}"


CLASSIFICATION: Final = AnswerTask()
