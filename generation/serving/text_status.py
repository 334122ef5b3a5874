"""Additional statistics of a generating model."""

from __future__ import annotations

from dataclasses import dataclass

from offramp.engine.requests.statistics import Histogram, ModelStatistics
from offramp.generation.bundle.text_model import TextEvidence
from offramp.generation.serving.generating_model import TextStatistics
from offramp.generation.serving.serving_options import NAME


@dataclass(frozen=True, slots=True, kw_only=True)
class TextStatus:
    """A snapshot of a served generating model."""

    statistics: TextStatistics
    layers: tuple[int, ...]
    """Number of layers that a token ran, for each stage where tokens leave; the last is the number
    of all layers."""
    length: int
    """Number of tokens that fit in a slot."""
    cache_bytes: int
    """Memory of all slots, in bytes."""
    first_token_s: Histogram
    """Time from a request to its first token, in seconds."""
    evidence: TextEvidence | None
    """The promise, if exits are in use."""

    @property
    def layers_run(self) -> float:
        """Mean share of the layers that a token ran, 0 to 1; 1 before the first token."""
        tokens = self.statistics.counts.tokens
        run = sum(count * layers for count, layers in zip(tokens, self.layers, strict=True))
        return run / (sum(tokens) * self.layers[-1]) if any(tokens) else 1.0


def text_status(statistics: ModelStatistics) -> TextStatus | None:
    """Return the statistics of a generating model; ``None`` for other models."""
    found = statistics.extensions.get(NAME)
    return found if isinstance(found, TextStatus) else None


def describe_evidence(evidence: TextEvidence) -> str:
    """Return a promise in one sentence, without its full stop."""
    bound = f"{100 * evidence.bound:.3g} %"
    if evidence.risk == "tokens":
        promised = f"at most {bound} of tokens differ from the unmodified model's at the same place"
    elif evidence.dissimilarity == "differs":
        promised = f"at most {bound} of answers differ from the unmodified model's"
    else:
        promised = (
            f"the mean distance of answers from the unmodified model's ({evidence.dissimilarity}) "
            f"is at most {bound}"
        )
    return (
        f"{promised}, on prompts like those of calibration, certified with "
        f"{100 * evidence.confidence_level:g} % confidence on {evidence.prompts:,} prompts "
        f"({100 * evidence.observed:.3g} % observed there)"
    )
