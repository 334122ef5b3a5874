"""A model's answers: their kind and form, when two of them agree, and how certain one is.

Exits, thresholds and promises use one fact about an answer: whether it agrees with the model's. The
task defines agreement. PAME 5.3 reads the certainty of an answer from its *principal values*: a
sample leaves when enough of them reach the threshold. A criterion turns them into one confidence
from 0 to 1, the only number that records, promises and kernels use. The exit's graph computes the
criteria of :data:`IN_GRAPH`; all others are computed on the host, from the exit's answers
(:mod:`offramp.engine.answers.criteria`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, get_args

from numpy.typing import NDArray

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
"""Kinds of answers. Their shapes, in the same order: [batch, classes]; [batch, labels]; [batch,
tokens, classes]; [batch, classes, height, width], or the classes of the pixels alone; [batch, key
points, height, width]; [batch, values]; any other shape and type, which no exit imitates."""
TASK_KINDS: Final[tuple[TaskKind, ...]] = tuple(k for k in get_args(TaskKind) if k != "other")
"""Kinds that exits can imitate, and so the kinds that can be requested."""
DENSE: Final[frozenset[TaskKind]] = frozenset({"token-classification", "segmentation", "pose"})
"""Tasks whose answer has several parts: tokens, pixels, or key points."""


MOST_LABELS: Final = 31
"""Largest number of labels for which every set of labels has a number; with more labels, sets are
distinguished by a checksum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerTask:
    """The kind of a model's answers, and the condition under which two answers agree."""

    kind: TaskKind = "classification"
    share: float = field(default=1.0, metadata=LEFT_OUT)
    """Smallest share of tokens, pixels or key points that must be equal, for the tasks in
    :data:`DENSE`."""
    within: float = field(default=0.0, metadata=LEFT_OUT)
    """Largest allowed difference of values (regression), or distance of key points, as a share of
    the longer side of the map (pose)."""
    mask: str | None = field(default=None, metadata=LEFT_OUT)
    """Graph input [batch, tokens] that marks tokens that count, for token classification."""

    def __post_init__(self) -> None:
        check_numbers(self, "share", above=0, most=1)
        check_numbers(self, "within", least=0)
        measured = self.kind in ("pose", "regression")
        if self.share != 1 and self.kind not in DENSE:
            raise ValueError(
                f"share is {self.share} for {self.kind}, whose answers have no tokens, pixels or "
                "key points"
            )
        if self.within and not measured:
            raise ValueError(f"within is {self.within} for {self.kind}, which compares classes")
        if self.mask is not None and self.kind != "token-classification":
            raise ValueError(f"mask is {self.mask!r:.100} for {self.kind}, which has no tokens")

    @property
    def is_dense(self) -> bool:
        """True if an answer has several parts: tokens, pixels, or key points."""
        return self.kind in DENSE

    @property
    def is_relative(self) -> bool:
        """True if answers agree when they are close; False if only equal answers agree."""
        return self.is_dense or self.kind == "regression"

    def code_bound(self, classes: int) -> int:
        """Return the upper bound (exclusive) of answer codes, for ``classes`` classes or labels."""
        if self.is_relative:
            return 2
        if self.kind == "classification":
            return classes
        return 1 << min(classes, MOST_LABELS)

    def describe(self) -> str:
        """Return the condition of agreement, as in ``it agrees if …``."""
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


IN_GRAPH: Final = ("probability", "entropy", "margin", "learned")
"""Criteria that use one answer alone: its largest probability; 1 − its entropy divided by the
largest possible one (BranchyNet, DeeBERT, inverted); the difference of its two largest
probabilities; a logistic regression on these three."""
PATIENCE: Final = "patience"
"""Criterion by the number of consecutive exits with the same class (PABEE);
:func:`.answers.criteria.patience`."""
BUILT_IN: Final = (*IN_GRAPH, PATIENCE)
LEARNED_WEIGHTS: Final = 4
"""Number of weights of ``learned`` for each exit: one for each of the three statistics' log-odds,
and a constant."""
_NAME: Final = re.compile(r"[a-z][a-z0-9_-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Criterion:
    """The function that computes how certain an exit is."""

    name: str = "probability"
    """One of ``BUILT_IN``, or the registered name of a user's function."""
    depends_on_earlier: bool = field(default=False, metadata=LEFT_OUT)
    """True if the criterion uses earlier exits' answers to a sample: then all exits of the bundle
    run, up to the last one in use."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"criterion {self.name!r:.80}: expected lower-case letters, digits, - and _, with "
                "a letter first"
            )
        if self.name in BUILT_IN and self.depends_on_earlier != (self.name == PATIENCE):
            depends = "depends" if self.depends_on_earlier else "does not depend"
            raise ValueError(
                f"criterion {self.name}: recorded that it {depends} on earlier exits, which is "
                "wrong"
            )

    @property
    def on_host(self) -> bool:
        """True if the criterion is computed from an exit's answers, outside of the exit's graph."""
        return self.name not in IN_GRAPH


PROBABILITY: Final = Criterion()


AnswerForm: TypeAlias = Literal["logits", "probabilities", "log-probabilities", "classes", "values"]
"""Form of the model's output. ``logits`` are values before the softmax, ``probabilities`` are
values after it, and ``log-probabilities`` are their logarithms. A softmax turns logits and
log-probabilities into probabilities. (For labels, each of which is a yes or no, a sigmoid replaces
the softmax.) ``classes`` are class indices, for each token or pixel. ``values`` are answers of
regression, heat maps, and scores of classes or labels on the model's scale, from which no
confidence can be derived."""


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
    """The model's output that exits imitate, and that decides whether answers agree."""

    output: str
    """Name of the model's output; for classification its shape is [batch, classes]."""
    classes: int
    """Number of classes, labels, key points or values, depending on the task."""
    form: AnswerForm
    task: AnswerTask = field(default=CLASSIFICATION, metadata=LEFT_OUT)
    tokens: tuple[int, ...] = field(default=(), metadata=LEFT_OUT)
    """Ids of the tokens that are the classes, in order, if the model is a decoder whose answer was
    reduced to these tokens."""
    criterion: Criterion = field(default=PROBABILITY, metadata=LEFT_OUT)
    """Criterion of the exits' confidence; for other tasks than classification, probability."""
    flat: bool = field(default=False, metadata=LEFT_OUT)
    """True if the model's file answers with one number a sample. Its answers, [batch], are served
    in this shape; the bundle's graphs have them as [batch, 1]."""
    tail: tuple[str, ...] = field(default=(), metadata=LEFT_OUT)
    """Operators after the scores: the model and every exit end with them (Apparate 3.1)."""
    thresholds: tuple[float, ...] = field(default=(), metadata=LEFT_OUT)
    """Smallest value at which each label counts as set; empty where the answer's form determines
    these values."""

    def __post_init__(self) -> None:
        check_numbers(self, "classes", least=1)
        if self.form not in _FORMS[self.task.kind]:
            known = ", ".join(_FORMS[self.task.kind])
            raise ValueError(f"form {self.form!r} is none of {self.task.kind}: {known}")
        if self.flat and self.classes != 1:
            raise ValueError(f"flat is for one number a sample, not for {self.classes}")
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
        """Return the graphs' answers in the shape that the model's file has."""
        return values[:, 0] if self.flat else values

    def describe(self) -> str:
        """Return ``10 classes, logits``, for people."""
        if self.task.kind == "other":
            return "numbers that no exit imitates"
        what = _COUNTED[self.task.kind]
        if self.task.is_dense:
            what += f" ({self.task.kind})"
        form = f", {self.form}" if self.form != "values" else ""
        judged = f", exits by {self.criterion.name}" if self.criterion != PROBABILITY else ""
        ended = f", then {', '.join(self.tail)}" if self.tail else ""
        return f"{self.classes} {what}{form}{ended}{judged}"


def shape_of(answer: Answer) -> tuple[int | None, ...]:
    """Return the shape of a model's answer; ``None`` for the batch and other open sizes."""
    classes = () if answer.form == "classes" else (answer.classes,)
    match answer.task.kind:
        case "token-classification":
            return (None, None, *classes)
        case "segmentation":
            return (None, *classes, None, None)
        case "pose":
            return (None, answer.classes, None, None)
        case _:
            return (None, answer.classes)
