"""What a generating model is made of: layers and their caches, stages, exits.

Plain facts, which compiling writes and serving reads; nothing here knows a runtime.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from offramp.bundle import NEVER
from offramp.bundle.schema.serde import check_numbers

TextKind: TypeAlias = Literal["decoder", "encoder-decoder"]
SkippedLayers: TypeAlias = Literal["propagation", "catch-up"]
"""How layers that a token skips get its keys and values: made of the exit's state at once
(CALM 3.3), or computed in full when a later token of the sequence comes so deep."""
TextCriterion: TypeAlias = Literal[
    "softmax margin", "max probability", "state similarity", "learned classifier"
]
"""How sure an exit is (CALM 3.5): the difference of its two largest probabilities, or the largest;
the cosine of the state and the one before its last layer; or a classifier that reads the state."""
TextRiskName: TypeAlias = Literal["tokens", "texts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCache:
    """Sizes of the keys and of the values that a decoder layer has for each token."""

    heads: int
    size: int
    cross_heads: int = 0
    """Of the keys and values of the encoder's output; 0 where there is no encoder."""
    cross_size: int = 0

    def __post_init__(self) -> None:
        check_numbers(self, "heads", "size", least=1)
        check_numbers(self, "cross_heads", "cross_size", least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextStage:
    """Some decoder layers, and the exit behind them."""

    end: int
    """Layers up to its exit, those of earlier stages included."""
    file: str
    """Graph of its layers: state, or tokens in the first stage, to the next state."""
    threshold: float | None = None
    """Least confidence that a token leaves with; above 1 none does, ``None`` at the end."""
    adapter: str = ""
    """Graph from the state to what the head reads in its place; empty if it reads the state."""
    propagation: str = ""
    """Graph from the state to the keys and values of all later layers; empty if there is none."""
    head: str = ""
    """Graph of a head of its own, as ``TextModel.head`` is one; empty if it has none."""
    judge: str = ""
    """Graph from the state to its confidence; empty if that comes from the head."""

    def __post_init__(self) -> None:
        check_numbers(self, "end", least=1)
        check_numbers(self, "threshold", least=0, most=NEVER)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextEvidence:
    """What was promised of the thresholds, and what was observed on prompts kept for that."""

    risk: TextRiskName
    """Tokens that differ at the same prefix, or how unlike whole answers are."""
    dissimilarity: str
    """Of whole answers: "differs", "edit-distance", or FILE.py:NAME of a function."""
    bound: float
    confidence_level: float
    observed: float
    """Of the risk."""
    prompts: int
    """That certified the thresholds."""
    layers_run: float
    """Mean share of the decoder's layers that a token ran, 0 to 1."""

    def __post_init__(self) -> None:
        check_numbers(self, "bound", "confidence_level", "observed", "layers_run", least=0, most=1)
        check_numbers(self, "prompts", least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextModel:
    """A decoder in stages, with the encoder before it if there is one."""

    kind: TextKind
    layers: tuple[LayerCache, ...]
    width: int
    """Of the state between layers."""
    vocabulary: int
    ragged: bool
    """Whether sequences of different lengths may share a step, padded and masked."""
    several: bool
    """Whether a step may have several tokens of a sequence; else they go one after another."""
    criterion: TextCriterion = "softmax margin"
    skipped: SkippedLayers = "propagation"
    stages: tuple[TextStage, ...]
    head: str
    """Graph from the state of the last token to token and confidence; all exits share it."""
    encoder: str = ""
    """Graph from a prompt to the keys and values of all layers; empty without an encoder."""
    start_token: int | None = None
    """First token that the decoder reads, of an encoder-decoder; a decoder has its prompt."""
    stop_tokens: tuple[int, ...] = ()
    """Tokens that end an answer."""
    decay: float | None = None
    """τ, by which thresholds fall along an answer; ``None`` if they do not."""
    longest_prompt: int = 1
    """Tokens of the longest prompt that it was compiled with."""
    longest_answer: int = 1
    """Tokens that an answer has at most, unless asked for otherwise."""
    evidence: TextEvidence | None = None
    """``None`` if nothing was certified."""

    def __post_init__(self) -> None:
        check_numbers(self, "width", "vocabulary", "longest_prompt", "longest_answer", least=1)
        check_numbers(self, "decay", least=0)
        ends = [stage.end for stage in self.stages]
        if not ends or ends != sorted(set(ends)) or ends[0] < 1 or ends[-1] != len(self.layers):
            raise ValueError(
                f"stages end behind layers {ends}, expected rising numbers of which the last is "
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
        """Files of all graphs."""
        named = [self.head, self.encoder]
        for stage in self.stages:
            named += [stage.file, stage.adapter, stage.propagation, stage.head, stage.judge]
        return tuple(dict.fromkeys(name for name in named if name))
