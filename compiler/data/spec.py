"""How data that are not arrays yet become arrays: options of images, texts and tables."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PreprocessingSpec:
    """How images, texts and tables become inputs; ``None`` is the default of each kind."""

    max_samples: int | None = None
    """Most samples that are read, from the first on; all where not given."""
