"""Batch sizes that stages are run at: few, since on a GPU every new size costs.

A size that comes up for the first time takes a CUDA graph with execution contexts of its own
(TensorRT), or has all convolutions planned anew (ONNX Runtime, whenever the size is another than
before: on an H100 a ResNet-101 takes 180 ms for that, and 12 ms for the batch). So batches are
filled up to the next of 1, 2, 4, 8, 12, 16, 24, 32, 48, … rows. What they are filled with are
their own first rows, which every stage takes, and whose results nobody reads. A stage takes less
than twice as many rows as a batch has.
"""

from __future__ import annotations

from collections.abc import Iterator

_DOUBLED_TO = 8
"""From there on there is a size between each and its double."""


def padded(rows: int, most: int) -> int:
    """Tell how many rows a batch is run as: ``most`` at most, which it does not exceed."""
    return min(next(size for size in _sizes() if size >= rows), most)


def _sizes() -> Iterator[int]:
    size = 1
    while True:
        yield size
        if size >= _DOUBLED_TO:
            yield size + size // 2
        size *= 2
