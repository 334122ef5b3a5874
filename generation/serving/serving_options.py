"""Options of an engine for generating models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from offramp.engine.models.options import EngineOptions, refuse_unless

NAME: Final = "generation"
"""Name of the extension in the options of an engine and in statistics."""
DEFAULT_SLOTS: Final = 16
_MOST_SLOTS, _MOST_LENGTH = 2**16, 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class TextServingOptions:
    """Options of the extension in an engine, on the command line and in the configuration file."""

    text_slots: int = DEFAULT_SLOTS
    """Number of sequences that have cache memory at a time, per generating model; others wait."""
    text_length: int | None = None
    """Number of tokens that fit in a slot: prompt and answer, or for an encoder-decoder the answer
    only. ``None`` fits the longest prompt and answer of compiling."""

    def __post_init__(self) -> None:
        refuse_unless(self, lambda v: 1 <= v <= _MOST_SLOTS, f"1 to {_MOST_SLOTS}", "text_slots")
        refuse_unless(self, lambda v: 2 <= v <= _MOST_LENGTH, f"2 to {_MOST_LENGTH}", "text_length")


def text_options(options: EngineOptions) -> TextServingOptions:
    """Return the extension's options of an engine, or the defaults."""
    found = options.extensions.get(NAME)
    return found if isinstance(found, TextServingOptions) else TextServingOptions()
