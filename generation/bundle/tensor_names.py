"""Tensor names of a generating model's graphs; they do not depend on the names in the export."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

IDS: Final = "input_ids"
"""int64 [n, tokens]."""
MASK: Final = "attention_mask"
"""int64 [n, past + tokens]: 1 for positions that count, 0 for padding."""
POSITIONS: Final = "position_ids"
"""int64 [n, tokens]: position of each token in its sequence."""
SOURCE_MASK: Final = "encoder_attention_mask"
"""int64 [n, source]: 1 for prompt tokens of an encoder-decoder, 0 for padding."""
STATE: Final = "state"
"""float32 [n, tokens, width]: input of a decoder layer."""
NEXT_STATE: Final = "next_state"
"""Output of the last layer of a segment; it has the shape of ``STATE``."""
PREVIOUS_STATE: Final = "previous_state"
"""Input of the last layer of a segment. A graph returns this tensor only if its exit reads it."""
ANSWER: Final = "answer"
"""int64 [n]: the most likely next token."""
CONFIDENCE: Final = "confidence"
"""float32 [n], 0 to 1; NaN where a logit is NaN."""
LOGITS: Final = "logits"
"""float32 [n, tokens, vocabulary]."""

CacheKind: TypeAlias = Literal["key", "value"]
KINDS: Final[tuple[CacheKind, ...]] = ("key", "value")


def past_name(layer: int, kind: CacheKind) -> str:
    """Return the name of the input with a layer's past keys or values, [n, heads, past, size]."""
    return f"past.{layer}.{kind}"


def new_name(layer: int, kind: CacheKind) -> str:
    """Return the name of the output with a layer's new keys or values, [n, heads, tokens, size]."""
    return f"new.{layer}.{kind}"


def stacked_name(heads: int, size: int) -> str:
    """Return the name of the output with all new keys and values of one size.

    Its shape is [layers * 2 * n, heads, tokens, size]: the keys of the first layer of that size,
    its values, the keys of the next layer, and so on.
    """
    return f"new.{heads}x{size}"


def cross_name(layer: int, kind: CacheKind) -> str:
    """Return the name of the keys or values of an encoder's output, [n, heads, source, size]."""
    return f"cross.{layer}.{kind}"


def size_name(symbol: str) -> str:
    """Return the name of an input, int64 [1], whose value is a size.

    A graph has such an input for a size that the shapes of its other inputs do not have.
    """
    return f"size.{symbol}"
