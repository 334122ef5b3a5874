"""What heads are trained on, recorded once.

Maps are pooled to grids by ONNX Runtime with the very operators that will be served; tokens and
vectors are kept whole. Stored as float16 in files that are mapped into memory, since tokens of a
real data set run to gigabytes; values beyond float16's range are clipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Answer
from offramp.calibration.augmentation import MadeSamples
from offramp.calibration.dataset import Dataset
from offramp.calibration.running import check_answers, run_over

_FLOAT16_MAX = 65504.0

WHOLE = 0
"""In place of a grid: the tensor as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Features of every candidate exit, and what the source model answered."""

    features: tuple[Mapping[int, NDArray[np.float16]], ...]
    """Per candidate, by grid: [n, channels · grid²]; by :data:`WHOLE`: [n, tokens, width] or
    [n, width]."""
    masks: Mapping[str, NDArray[Any]]
    """The masks that heads use, by graph input: [n, tokens]."""
    answers: NDArray[np.float32]
    """[n, classes]: the source model's."""

    def subset(self, rows: slice | NDArray[np.intp]) -> Recording:
        """Give some samples; of a slice nothing is copied."""
        return Recording(
            features=tuple({key: v[rows] for key, v in e.items()} for e in self.features),
            masks={name: mask[rows] for name, mask in self.masks.items()},
            answers=self.answers[rows],
        )


def record(
    model: bytes,
    outputs: tuple[Mapping[int, str], ...],
    answer: Answer,
    dataset: Dataset,
    *,
    made: MadeSamples | None = None,
    threads: int,
    directory: Path,
    progress: Callable[[int], None] = lambda _: None,
) -> Recording:
    """Run the source model with all poolings attached over a data set.

    Args:
        model: The joined graph: segments and poolings.
        outputs: Per candidate, the graph's outputs by grid.
        answer: The source model's.
        dataset: Samples; all of them are recorded.
        made: More samples, recorded behind those; the ones that the source model has no finite
            answer to are left out.
        threads: Of ONNX Runtime.
        directory: Where to put the files; the caller removes it.
        progress: Called with the number of samples of each finished batch.

    Raises:
        DataError: The source model fails on a sample, or its answers are not finite.
    """
    names = [name for per_exit in outputs for name in per_exit.values()]
    total = len(dataset) + (0 if made is None else len(made))
    stores: dict[str, NDArray[np.float16]] = {}
    answers = np.empty((total, answer.classes), np.float32)
    wanted = [answer.output, *names]
    for part, start in ((dataset, 0), (made, len(dataset))):
        if part is None:
            continue
        for rows, (answered, *values) in run_over(model, wanted, part, threads=threads):
            if part is dataset:
                check_answers(answered, dataset.rows[rows])
            place = slice(start + rows.start, start + rows.stop)
            answers[place] = answered
            for name, value in zip(names, values, strict=True):
                if name not in stores:
                    directory.mkdir(exist_ok=True)
                    shape = (total, *value.shape[1:])
                    stores[name] = _allocate(directory, len(stores), shape)
                stores[name][place] = np.clip(value, -_FLOAT16_MAX, _FLOAT16_MAX)
            progress(len(answered))
    features = tuple({grid: stores[name] for grid, name in e.items()} for e in outputs)
    recording = Recording(features=features, masks=_masks(dataset, made), answers=answers)
    finite = np.isfinite(answers).all(axis=1)
    return recording if finite.all() else recording.subset(np.flatnonzero(finite))


def _allocate(directory: Path, number: int, shape: tuple[int, ...]) -> NDArray[np.float16]:
    store: NDArray[np.float16] = np.lib.format.open_memmap(
        directory / f"{number}.npy", mode="w+", dtype=np.float16, shape=shape
    )
    return store


def _masks(dataset: Dataset, made: MadeSamples | None) -> dict[str, NDArray[Any]]:
    names = [name for name, array in dataset.inputs.items() if array.ndim == 2]
    if made is None:
        return {name: dataset.inputs[name] for name in names}
    return {name: np.concatenate([dataset.inputs[name], made.column(name)]) for name in names}
