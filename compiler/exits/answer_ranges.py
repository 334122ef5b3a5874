"""The range of exits' answers, compared with the model's: the last look at their scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from offramp.compiler.common.errors import VerificationError
from offramp.compiler.graphs.source_model import SourceModel

_ROUNDING: Final = 0.01
"""Share of a range that answers may be outside of it."""


def check_ranges(
    model: SourceModel, ranges: NDArray[np.float64], active: Sequence[int], *, slack: float
) -> None:
    """Compare the answers of exits in use with the scale of the model's.

    ``ranges`` [exits + 1, 2] are those of each exit and of the model; ``slack`` is what rounding
    may add, as a share of the model's range. VerificationError if an exit leaves the scale.
    """
    if not active or model.answer.form == "classes":
        return
    *exits, own = ranges.tolist()
    least, most = min(exits[e][0] for e in active), max(exits[e][1] for e in active)
    bounds = _bounds_of(model)
    if bounds is None:
        return
    allowed = max(slack, _ROUNDING) * (bounds[1] - bounds[0])
    if least < bounds[0] - allowed or most > bounds[1] + allowed:
        raise VerificationError(
            f"exits answer on another scale than the model: from {least:.3g} to {most:.3g}, "
            f"expected {bounds[0]:.3g} to {bounds[1]:.3g} (the model's answers are from "
            f"{own[0]:.3g} to {own[1]:.3g}); this is a defect, report it with the model. Until it "
            "is mended, end the model at its probabilities or logits"
        )


def both_ranges(model: SourceModel, ranges: NDArray[np.float64] | None) -> tuple[float, ...]:
    """List the ends of the model's range, then those of its exits', where the model has a tail."""
    if not model.answer.tail or ranges is None or len(ranges) < 2 or not np.isfinite(ranges).all():
        return ()
    exits, own = ranges[:-1], ranges[-1]
    return (*own.tolist(), float(exits[:, 0].min()), float(exits[:, 1].max()))


def _bounds_of(model: SourceModel) -> tuple[float, float] | None:
    """Return the smallest and largest value that answers can have; None where there are none."""
    if model.tail is not None:
        return model.tail.bounds
    return (0.0, 1.0) if model.answer.form == "probabilities" else None
