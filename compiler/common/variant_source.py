"""Where smaller variants of a model come from: an extension's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from offramp.commands.combinations import Illegal


class VariantSource(Protocol):
    """Makes variants of the model that is compiled."""

    @property
    def flag(self) -> str:
        """The option that asks for it."""
        ...

    @property
    def combinations(self) -> Sequence[Illegal]:
        """Combinations of it with other options that are refused."""
        ...

    def prepare(self, model: Any) -> Any:
        """Return a :class:`.VariantFinder` of a :class:`.SourceModel`; CompileError."""
        ...
