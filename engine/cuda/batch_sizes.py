"""Batch sizes that stages are run at: few, because on a GPU every new size has a cost.

A new size needs a CUDA graph with its own execution contexts (TensorRT), or a new plan of all
convolutions (ONNX Runtime, whenever the size changes: on an H100 this takes 180 ms for a
ResNet-101, and the batch 12 ms). So batches are padded to the next of 1, 2, 4, 8, 12, 16, 24, 32,
48, … rows. The padding rows are copies of the batch's first rows: valid inputs of every stage,
whose results are not read. A stage runs less than twice the rows of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator

_DOUBLED_TO = 8
"""Batch size up to which sizes double; above it, there is one more size between a size and its
double."""


def padded(rows: int, most: int) -> int:
    """Return the padded number of rows of a batch; ``rows`` is at most ``most``."""
    return min(next(size for size in _sizes() if size >= rows), most)


def _sizes() -> Iterator[int]:
    size = 1
    while True:
        yield size
        if size >= _DOUBLED_TO:
            yield size + size // 2
        size *= 2
