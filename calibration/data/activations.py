"""Tensors inside a model, computed for samples batch by batch, within bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from offramp.calibration.data.dataset import DataError, Dataset
from offramp.calibration.data.running import BATCH_SIZE
from offramp.engine.backends.onnxruntime import make_session

BATCH_BYTES = 2**28
"""Bytes of a batch's activations that are held in memory."""


def activations(
    proto: onnx.ModelProto, tensors: Sequence[str], dataset: Dataset, *, threads: int
) -> Iterator[tuple[str, NDArray[Any], str]]:
    """Yield, batch by batch, some float32 tensors by name, and the batch's range of samples.

    The range is text for messages. Nothing is written to the disk. A ``DataError`` if the model
    fails on a sample.
    """
    if not len(dataset):
        raise DataError("no samples to measure the ranges of activations on; pass some hundreds")
    given = {i.name for i in proto.graph.input}
    inner = [name for name in tensors if name not in given]
    session = make_session(_exposing(proto, inner), threads)
    read = [tensor.name for tensor in session.get_inputs()]
    start, size = 0, 1
    while start < len(dataset):
        batch = dataset.take(slice(start, start + size))
        where = f"{dataset.rows[start]} to {dataset.rows[min(start + size, len(dataset)) - 1]}"
        try:
            # an empty list would ask for all outputs
            feeds = {name: batch[name] for name in read}
            values = session.run(inner, feeds) if inner else []
        except Exception as error:  # ONNX Runtime's own classes derive from Exception only
            reason = str(error).splitlines()[0]
            raise DataError(f"the model fails on one of samples {where}: {reason}") from error
        arrays = batch | dict(zip(inner, values, strict=True))
        for name in tensors:
            yield name, arrays[name], where
        start += size
        a_sample = sum(array.nbytes for array in values) // size
        size = max(1, min(BATCH_SIZE, BATCH_BYTES // max(a_sample, 1)))


def _exposing(proto: onnx.ModelProto, tensors: Sequence[str]) -> bytes:
    """Return the model with inner tensors as additional outputs."""
    exposed = onnx.ModelProto()
    exposed.CopyFrom(proto)
    inner = [name for name in tensors if name not in {o.name for o in proto.graph.output}]
    exposed.graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in inner
    )
    serialised: bytes = exposed.SerializeToString()
    return serialised
