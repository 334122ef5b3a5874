"""The samples of a dry run, drawn within what a model accepts."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from offramp.compiler.data.made import RandomSource
from offramp.compiler.graphs.runtime import random_inputs
from offramp.compiler.graphs.source_model import SourceModel

_log = logging.getLogger(__name__)
WARNING = (
    "DRY RUN ON RANDOM INPUTS: nothing is certified. Times are real; shares of answers and "
    "agreement say nothing about your data."
)

DRY_RUN_DISAGREEMENT = 0.5
"""Bound by which exits are worth building in a dry run: few imitate answers to noise well."""


def made_for(model: SourceModel, source: RandomSource, *, seed: int) -> RandomSource:
    """Return the source of made inputs for a model, and warn that they certify nothing."""
    _log.warning(WARNING)

    def draw(size: int, batch: int) -> Mapping[str, NDArray[Any]]:
        return random_inputs(model.proto, size, seed=1_000_003 * seed + batch, whole=True)

    return source.drawn_by(draw)
