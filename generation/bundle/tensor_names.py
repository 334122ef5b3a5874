"""Names of the tensors of a generating model's graphs, whatever its export called them."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

IDS: Final = "input_ids"
"""int64 [n, tokens]."""
MASK: Final = "attention_mask"
"""int64 [n, past + tokens]: 1 where a position counts, 0 where it pads."""
POSITIONS: Final = "position_ids"
"""int64 [n, tokens]: the place of each token in its sequence."""
SOURCE_MASK: Final = "encoder_attention_mask"
"""int64 [n, source]: 1 for tokens of the prompt of an encoder-decoder, 0 for padding."""
STATE: Final = "state"
"""float32 [n, tokens, width]: what enters a decoder layer."""
NEXT_STATE: Final = "next_state"
"""The same behind the last layer of a segment."""
PREVIOUS_STATE: Final = "previous_state"
"""The same before the last layer of a segment; only graphs whose exit reads it return it."""
ANSWER: Final = "answer"
"""int64 [n]: the most likely next token."""
CONFIDENCE: Final = "confidence"
"""float32 [n], 0 to 1; NaN where logits are."""
LOGITS: Final = "logits"
"""float32 [n, tokens, vocabulary]."""

CacheKind: TypeAlias = Literal["key", "value"]
KINDS: Final[tuple[CacheKind, ...]] = ("key", "value")


def past_name(layer: int, kind: CacheKind) -> str:
    """Name the input with a layer's earlier keys or values, [n, heads, past, size]."""
    return f"past.{layer}.{kind}"


def new_name(layer: int, kind: CacheKind) -> str:
    """Name a layer's keys or values of the tokens of a step, [n, heads, tokens, size]."""
    return f"new.{layer}.{kind}"


def stacked_name(heads: int, size: int) -> str:
    """Name the output with new keys and values of one size, [layers * 2 * n, heads, tokens, size].

    Keys of the first layer of that size, its values, keys of the next one, and so on.
    """
    return f"new.{heads}x{size}"


def cross_name(layer: int, kind: CacheKind) -> str:
    """Name the keys or values of an encoder's output, [n, heads, source, size]."""
    return f"cross.{layer}.{kind}"


def size_name(symbol: str) -> str:
    """Name the input, int64 [1], with a size that no other input of a graph has."""
    return f"size.{symbol}"
