"""What may be asked of an engine about generating models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from offramp.engine.models.options import EngineOptions, refuse_unless

NAME: Final = "generation"
"""Of the extension, among the options of an engine and in statistics."""
DEFAULT_SLOTS: Final = 16
_MOST_SLOTS, _MOST_LENGTH = 2**16, 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class TextServingOptions:
    """The extension's options of an engine; those of command line and configuration file, too."""

    text_slots: int = DEFAULT_SLOTS
    """Sequences that have cache memory at a time, of each generating model; others wait."""
    text_length: int | None = None
    """Tokens that a slot has memory for: prompt and answer, of an encoder-decoder the answer's.
    ``None`` is the longest prompt and answer that the model was compiled for."""

    def __post_init__(self) -> None:
        refuse_unless(self, lambda v: 1 <= v <= _MOST_SLOTS, f"1 to {_MOST_SLOTS}", "text_slots")
        refuse_unless(self, lambda v: 2 <= v <= _MOST_LENGTH, f"2 to {_MOST_LENGTH}", "text_length")


def text_options(options: EngineOptions) -> TextServingOptions:
    """Return the extension's options of an engine, the defaults if it has none."""
    found = options.extensions.get(NAME)
    return found if isinstance(found, TextServingOptions) else TextServingOptions()
