"""Description of a generating model: layers and their caches, stages, exits.

The classes hold plain facts: compiling writes these facts, and serving reads them. No runtime is
imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from offramp.bundle import NEVER
from offramp.bundle.schema.serde import check_numbers

TextKind: TypeAlias = Literal["decoder", "encoder-decoder"]
SkippedLayers: TypeAlias = Literal["propagation", "catch-up"]
"""Source of the keys and values of layers that a token skips: the exit's state when the token
leaves (CALM 3.3), or full computation when a later token of the sequence reaches those layers."""
TextCriterion: TypeAlias = Literal[
    "softmax margin", "max probability", "state similarity", "learned classifier"
]
"""Confidence of an exit (CALM 3.5): the difference of its two largest probabilities; the largest
probability; the cosine between the output and the input of the layer before the exit; or a
classifier's result for the state."""
TextRiskName: TypeAlias = Literal["tokens", "texts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCache:
    """Sizes of the keys and the values of one token in a decoder layer."""

    heads: int
    size: int
    cross_heads: int = 0
    """Number of heads in the keys and values of the encoder's output; 0 without an encoder."""
    cross_size: int = 0

    def __post_init__(self) -> None:
        check_numbers(self, "heads", "size", least=1)
        check_numbers(self, "cross_heads", "cross_size", least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextStage:
    """Consecutive decoder layers, and the exit after them."""

    end: int
    """Number of layers from the model's start to the exit, including those of earlier stages."""
    file: str
    """File of the layers' graph: state (in the first stage: tokens) to next state."""
    threshold: float | None = None
    """Lowest confidence at which a token leaves (above 1: none leaves); ``None`` at the model's
    end."""
    adapter: str = ""
    """File of the graph from state to head input; empty if the head reads the state itself."""
    propagation: str = ""
    """File of the graph from the state to all later layers' keys and values; empty if none."""
    head: str = ""
    """File of the exit's own head, which replaces ``TextModel.head``; empty if the exit has no own
    head."""
    judge: str = ""
    """File of the graph from the state to the confidence; empty if the head computes the
    confidence."""

    def __post_init__(self) -> None:
        check_numbers(self, "end", least=1)
        check_numbers(self, "threshold", least=0, most=NEVER)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextEvidence:
    """The promise about the thresholds, and the risk observed on held-out prompts."""

    risk: TextRiskName
    """Name of the bounded risk: ``tokens`` or ``texts``, see :mod:`.promise.text_promise`."""
    dissimilarity: str
    """Dissimilarity of whole answers: "differs", "edit-distance", or FILE.py:NAME of a function."""
    bound: float
    confidence_level: float
    observed: float
    """Risk observed on the prompts that certified the thresholds."""
    prompts: int
    """Number of prompts that certified the thresholds."""
    layers_run: float
    """Mean share of the decoder's layers that run for a token, 0 to 1."""

    def __post_init__(self) -> None:
        check_numbers(self, "bound", "confidence_level", "observed", "layers_run", least=0, most=1)
        check_numbers(self, "prompts", least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextModel:
    """A decoder in stages, after an encoder if there is one."""

    kind: TextKind
    layers: tuple[LayerCache, ...]
    width: int
    """Size of the state between layers."""
    vocabulary: int
    ragged: bool
    """True if sequences of different lengths may share a step, padded and masked."""
    several: bool
    """True if a step may have several tokens of one sequence; otherwise a step has one token of it.
    """
    criterion: TextCriterion = "softmax margin"
    skipped: SkippedLayers = "propagation"
    stages: tuple[TextStage, ...]
    head: str
    """File of the graph from the last token's state to the next token and its confidence; shared by
    all exits without their own head."""
    encoder: str = ""
    """File of the graph from a prompt to the encoder's keys and values for all layers; empty
    without an encoder."""
    start_token: int | None = None
    """First token that the decoder of an encoder-decoder reads; ``None`` for a decoder."""
    stop_tokens: tuple[int, ...] = ()
    """Tokens that end an answer."""
    decay: float | None = None
    """τ, the speed at which thresholds fall along an answer; ``None`` if they are constant."""
    longest_prompt: int = 1
    """Number of tokens in the longest prompt that compiling used."""
    longest_answer: int = 1
    """Default limit on the number of tokens in an answer."""
    evidence: TextEvidence | None = None
    """Certified promise; ``None`` if nothing was certified."""

    def __post_init__(self) -> None:
        check_numbers(self, "width", "vocabulary", "longest_prompt", "longest_answer", least=1)
        check_numbers(self, "decay", least=0)
        ends = [stage.end for stage in self.stages]
        if not ends or ends != sorted(set(ends)) or ends[0] < 1 or ends[-1] != len(self.layers):
            raise ValueError(
                f"stages end after layers {ends}, expected increasing numbers, the last being "
                f"the number of layers, {len(self.layers)}"
            )
        open_ends = [stage.threshold is None for stage in self.stages]
        if open_ends != [False] * (len(ends) - 1) + [True]:
            raise ValueError("each stage but the last needs a threshold, and the last has none")
        encodes = self.kind == "encoder-decoder"
        crossed = [bool(layer.cross_heads) for layer in self.layers]
        if encodes != bool(self.encoder) or any(c != encodes for c in crossed):
            raise ValueError(f"a {self.kind} must {'' if encodes else 'not '}have an encoder")
        if encodes != (self.start_token is not None):
            raise ValueError(
                f"a {self.kind} must {'' if encodes else 'not '}have a start token, this has "
                f"{self.start_token}"
            )
        tokens = [*self.stop_tokens, *([] if self.start_token is None else [self.start_token])]
        if any(not 0 <= token < self.vocabulary for token in tokens):
            raise ValueError(
                f"start and stop tokens {tokens} must be in the vocabulary, 0 to "
                f"{self.vocabulary - 1}"
            )
        judged = self.criterion in {"state similarity", "learned classifier"}
        if judged and not all(stage.judge for stage in self.stages[:-1]):
            raise ValueError(
                f"each exit needs the graph of its judge: the criterion is {self.criterion!r}"
            )
        if self.skipped == "propagation" and not all(s.propagation for s in self.stages[:-1]):
            raise ValueError("each exit needs a propagation graph where skipped layers are filled")

    def layers_of(self, stage: int) -> range:
        """Return the numbers of the layers that a stage runs."""
        return range(self.stages[stage - 1].end if stage else 0, self.stages[stage].end)

    @property
    def graphs(self) -> tuple[str, ...]:
        """Names of the files of all graphs, each once."""
        named = [self.head, self.encoder]
        for stage in self.stages:
            named += [stage.file, stage.adapter, stage.propagation, stage.head, stage.judge]
        return tuple(dict.fromkeys(name for name in named if name))
