"""Run a graph over a data set, batch by batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from numpy.typing import NDArray

from offramp.calibration.dataset import Dataset
from offramp.calibration.errors import DataError
from offramp.engine.backends.onnxruntime import make_session

BATCH_SIZE = 64


def run_over(
    model: bytes, outputs: Sequence[str], dataset: Dataset, *, threads: int
) -> Iterator[tuple[slice, list[NDArray[Any]]]]:
    """Give the rows of each batch, and the graph's ``outputs`` for them.

    Args:
        model: The graph; it may read fewer inputs than the data set has.
        outputs: Names of its outputs.
        dataset: All samples are run, in order.
        threads: Of ONNX Runtime.

    Raises:
        DataError: The model fails on a batch, for instance on a token beyond its vocabulary.
    """
    session = make_session(model, threads)
    read = [tensor.name for tensor in session.get_inputs()]
    for start in range(0, len(dataset), BATCH_SIZE):
        rows = slice(start, min(start + BATCH_SIZE, len(dataset)))
        batch = dataset.take(rows)
        try:
            values = session.run(outputs, {name: batch[name] for name in read})
        except Exception as error:  # ONNX Runtime's own classes derive from Exception only
            reason = str(error).splitlines()[0]
            raise DataError(
                f"the model fails on calibration samples {rows.start} to {rows.stop - 1} of a "
                f"part of the data: {reason}"
            ) from error
        yield rows, values
