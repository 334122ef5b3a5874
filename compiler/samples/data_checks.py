"""Checks of calibration data that need the model: which values it takes, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence

from offramp.bundle import ValueBound
from offramp.calibration.data.data_sources import data_name
from offramp.calibration.data.dataset import DataError, Dataset
from offramp.calibration.data.running import check_unusual
from offramp.compiler.common.options import CompileOptions
from offramp.compiler.graphs.graph import serialised
from offramp.compiler.graphs.source_model import SourceModel
from offramp.engine.requests.value_limits import ValueLimits


def check_answers_of(model: SourceModel, dataset: Dataset, options: CompileOptions) -> None:
    """Refuse samples with NaN or infinity that the model gives no answer to."""
    try:
        check_unusual(
            lambda: serialised(model.proto), dataset, model.answer, threads=options.threads
        )
    except DataError as error:
        raise DataError(f"{data_name(options.data)}: {error}") from error


def check_values(bounds: Sequence[ValueBound], dataset: Dataset, options: CompileOptions) -> None:
    """Refuse data with values that the model fails on."""
    limits, first = ValueLimits(bounds), 0
    for batch in dataset.batches():
        if wrong := limits.wrong(batch):
            where = f"from sample {first} on, " if first else ""
            raise DataError(f"{data_name(options.data)}: {where}{wrong}")
        first += len(next(iter(batch.values())))
