"""Whether a sample's answer depends on the samples that share its batch.

With a server's batches it must not: the same request would be answered otherwise under load, and
what was certified on batches of one size would hold for none of the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from offramp.engine.answers.differences import Scales, relative_difference
from offramp.engine.backends.onnxruntime import make_session

TOLERANCE = 1e-3
"""Of the scale of each number (:mod:`.answers.differences`). Float32 kernels add up in an
order that depends on the batch size, which moves the last bits (1e-7), and where what follows is
rounded to 255 steps, now and then an activation by one step. Scales that are taken over a batch
move them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDependence:
    """How far answers of the same rows differ between batches."""

    rows: int
    changed: int
    """Rows whose largest class was another in some batch."""
    difference: float
    """The largest difference of a number, relative to its scale; 0 is no difference."""

    @property
    def depends(self) -> bool:
        """Whether answers differ by more than rounding explains (:data:`TOLERANCE`)."""
        return not self.difference <= TOLERANCE


def depends_on_batch_mates(
    graph: bytes, samples: Mapping[str, NDArray[Any]], *, answer: str, threads: int = 1
) -> BatchDependence:
    """Run rows together, alone, with other mates and in another order, and compare each row.

    ``samples`` are inputs by name, of as many rows as the largest batch served, 2 at least
    (``ValueError``); ``answer`` is the output [rows, classes] that is compared.
    """
    rows = len(next(iter(samples.values())))
    if rows < 2:
        raise ValueError(f"{rows} samples have no batch mates; give 2 at least, 16 do well")
    session = make_session(graph, threads)
    together = _run(session, samples, np.arange(rows), answer)
    scales = Scales.of(together)
    difference = np.inf if np.isnan(together).any() else 0.0
    changed = np.zeros(rows, bool)
    for chosen in _batches(rows):
        found = _run(session, samples, chosen, answer)
        difference = max(difference, relative_difference(found, together[chosen], scales))
        changed[chosen] |= found.argmax(axis=1) != together[chosen].argmax(axis=1)
    return BatchDependence(rows=rows, changed=int(changed.sum()), difference=difference)


def _batches(rows: int) -> Iterator[NDArray[np.intp]]:
    """Give every row alone; then batches that double in size, in another order each."""
    order = np.arange(rows)
    yield from order[:, None]
    rng = np.random.default_rng(0)
    size = 2
    while size < rows:
        order = rng.permutation(rows)
        yield from (order[start : start + size] for start in range(0, rows, size))
        size *= 2
    yield order[::-1]


def _run(
    session: ort.InferenceSession,
    samples: Mapping[str, NDArray[Any]],
    rows: NDArray[np.intp],
    answer: str,
) -> NDArray[Any]:
    feeds = {i.name: samples[i.name][rows] for i in session.get_inputs()}
    (found,) = session.run([answer], feeds)
    array: NDArray[Any] = found
    return array
