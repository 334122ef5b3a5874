"""Whether samples may share a batch: found on made inputs, as there are no data.

Rows of several magnitudes run alone, all together and a few together. Whatever cannot be verified
counts as mixing: then every sample is served in a batch of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import onnx
from numpy.typing import NDArray

from offramp.compiler.common.rounding import rounding_of
from offramp.compiler.graphs.rows import scaled_by_batch
from offramp.compiler.graphs.runtime import GraphRunner, describe_shapes, random_inputs
from offramp.engine.answers.differences import compare
from offramp.engine.common.environment import available_cores

Arrays: TypeAlias = "Mapping[str, NDArray[Any]]"

_ROWS: Final = 5
_BATCHES: Final = 4
"""Made batches, each of other values."""
_MAGNITUDES: Final = (1.0, 0.1, 30.0, 0.0, -3.0)
"""Factors of the rows of floating-point inputs: what scales by a batch shows at large and small."""
_ALLOWED: Final = 1e-3
"""Difference that rounding may make, relative to the scale of the row's own values: what a row is
rounded by where large values cancel out is no scale of its answer."""
_SECONDS: Final = 10.0
"""Time after which no further made batch is run."""


def find_mixing(proto: onnx.ModelProto) -> str:
    """Return why samples must not share a batch, of a model with a symbolic one; empty if they may.

    The checks of :func:`.free_batch` have passed: here follow what these leave to the data.
    """
    if operators := scaled_by_batch(proto):
        first = operators[0]
        return (
            f"{len(operators)} operators round by the range of the whole batch, first "
            f"{first.name or first.writes[0]!r} ({first.kind})"
        )
    runner = GraphRunner(proto, available_cores())
    allowed = max(rounding_of(proto).batches, _ALLOWED)
    began_s, compared, failure = time.monotonic(), 0, ""
    for feeds in _made(proto):
        if compared and time.monotonic() - began_s > _SECONDS:
            break
        try:
            alone = [runner.run(_rows(feeds, [row])) for row in range(_ROWS)]
        except RuntimeError as error:
            failure = f"{describe_shapes(_rows(feeds, [0]))}: {error}"
            continue
        compared += 1
        if reason := _apart(runner, feeds, alone, allowed):
            return reason
    if compared:
        return ""
    return (
        f"it cannot be verified that samples do not change each other's answers, as made inputs "
        f"fail ({failure})"
    )


def gives_rows(proto: onnx.ModelProto) -> bool:
    """Whether a model answers one sample with one row, and several, if they run, with as many."""
    for count in (1, 3):
        feeds = random_inputs(proto, count)
        rows = len(next(iter(feeds.values())))  # one where the batch is fixed
        try:
            outputs = GraphRunner(proto).run(feeds).values()
        except RuntimeError:
            continue
        if any(output.ndim == 0 or len(output) != rows for output in outputs):
            return False
    return True


def _made(proto: onnx.ModelProto) -> Iterator[dict[str, NDArray[Any]]]:
    """Yield batches of :data:`_ROWS` made rows: alike, and of several magnitudes."""
    for seed in range(_BATCHES):
        feeds = random_inputs(proto, _ROWS, seed=seed)
        if seed % 2:
            feeds = {name: _spread(array) for name, array in feeds.items()}
        yield feeds


def _spread(array: NDArray[Any]) -> NDArray[Any]:
    if not np.issubdtype(array.dtype, np.floating):
        return array
    factors = np.array(_MAGNITUDES).reshape(-1, *(1,) * (array.ndim - 1))
    spread: NDArray[Any] = (array * factors).astype(array.dtype)
    return spread


def _apart(runner: GraphRunner, feeds: Arrays, alone: Sequence[Arrays], allowed: float) -> str:
    """Return where rows in company differ from rows alone; empty where they do not."""
    for chosen in ([*range(_ROWS)], [_ROWS - 1, 0], [2, 3, 1]):
        try:
            together = runner.run(_rows(feeds, chosen))
        except RuntimeError as error:
            return f"{len(chosen)} samples do not run in one batch: {error}"
        for name, values in together.items():
            for place, row in enumerate(chosen):  # each by its own scale: others may be larger
                difference = compare(values[place : place + 1], alone[row][name])
                if not difference.share <= allowed:
                    return (
                        f"samples change each other's answers: output {name!r} of one among "
                        f"{len(chosen)} made samples differs from that of the same one alone, by "
                        f"{difference.describe()}"
                    )
    return ""


def _rows(arrays: Arrays, rows: Sequence[int]) -> dict[str, NDArray[Any]]:
    return {name: array[list(rows)] for name, array in arrays.items()}
