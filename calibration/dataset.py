"""Data sets in npz files: one array per model input, and labels where there are any."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import TensorSpec
from offramp.bundle.npz import NpzError, open_regular, physical_memory_bytes, read_npz
from offramp.engine.validation import check_tensors

LABEL_KEYS = ("label", "labels")
"""Names under which an npz may hold the true classes, int [n]."""


class DataError(Exception):
    """The calibration or test data cannot be used; the message names the array and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TakenInputs(Mapping[str, NDArray[Any]]):
    """The inputs of some samples of a data set, which stay where they are.

    An input is copied when it is asked for as a whole; :meth:`Dataset.take` copies what it gives.
    """

    whole: Mapping[str, NDArray[Any]]
    """The inputs of all samples."""
    rows: NDArray[np.intp]

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.whole[name][self.rows]

    def __iter__(self) -> Iterator[str]:
        return iter(self.whole)

    def __len__(self) -> int:
        return len(self.whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Samples in the format that the model takes, with their labels where there are any."""

    inputs: Mapping[str, NDArray[Any]]
    """By input name, first dimension n."""
    labels: NDArray[np.int64] | None
    """[n], only for reporting accuracy."""
    sha256: str
    """Hash of the file, for the manifest."""
    taken: NDArray[np.intp] | None = None
    """[n]: the samples of the file that these are; ``None`` is all of them."""

    @property
    def rows(self) -> NDArray[np.intp]:
        """The place of each sample in the file, [n], for messages."""
        return np.arange(len(self)) if self.taken is None else self.taken

    def __len__(self) -> int:
        if isinstance(self.inputs, TakenInputs):
            return len(self.inputs.rows)
        return len(next(iter(self.inputs.values())))

    def subset(self, rows: NDArray[np.intp]) -> Dataset:
        """Give some samples as a data set (of the same file), without copying their inputs."""
        labels = None if self.labels is None else self.labels[rows]
        inputs = TakenInputs(whole=self.inputs, rows=rows)
        if isinstance(self.inputs, TakenInputs):
            inputs = TakenInputs(whole=self.inputs.whole, rows=self.inputs.rows[rows])
        return replace(self, inputs=inputs, labels=labels, taken=self.rows[rows])

    def take(self, rows: slice | NDArray[np.intp]) -> dict[str, NDArray[Any]]:
        """Give the inputs of some samples."""
        return {name: self.column(name, rows) for name in self.inputs}

    def column(self, name: str, rows: slice | NDArray[np.intp]) -> NDArray[Any]:
        """Give one input of some samples."""
        if isinstance(self.inputs, TakenInputs):
            return self.inputs.whole[name][self.inputs.rows[rows]]
        return self.inputs[name][rows]

    def batches(self, size: int = 1024) -> Iterator[dict[str, NDArray[Any]]]:
        """Give the inputs of all samples, so many at a time."""
        for start in range(0, len(self), size):
            yield self.take(slice(start, start + size))


def read_dataset(path: Path, specs: Sequence[TensorSpec]) -> Dataset:
    """Read an npz file and check it against the model's inputs.

    A ``DataError`` where the file cannot be read, an array's name, dtype or shape is not what the
    model takes, arrays have different lengths, or values are NaN or infinite.
    """
    arrays = _load(path)
    names = {spec.name for spec in specs}
    found = [key for key in LABEL_KEYS if key in arrays and key not in names]
    if len(found) > 1:
        raise DataError(f"{path}: has both {' and '.join(found)}; keep one of them")
    labels = arrays.pop(found[0]) if found else None
    if wrong := check_tensors(specs, arrays):
        raise DataError(f"{path}: {wrong}")
    _check_lengths(path, arrays, labels)
    for name, array in arrays.items():
        _check_finite(path, name, array)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    truth = None if labels is None else labels.astype(np.int64)
    return Dataset(inputs=arrays, labels=truth, sha256=digest)


def _load(path: Path) -> dict[str, NDArray[Any]]:
    try:
        with open_regular(path) as file:
            if file.read(6) == b"\x93NUMPY":
                raise DataError(f"{path} is a single array; save named ones with numpy.savez")
            # What does not fit into memory would not be read, but end the process.
            return read_npz(file, max_bytes=physical_memory_bytes())
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except (OSError, NpzError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(
            f"{path} is not an npz file of plain arrays ({reason}); "
            "write one with numpy.savez_compressed(path, INPUT=array, label=classes)"
        ) from error


def _check_lengths(
    path: Path, arrays: Mapping[str, NDArray[Any]], labels: NDArray[Any] | None
) -> None:
    lengths = {name: len(array) for name, array in arrays.items()}
    if labels is not None:
        if labels.ndim != 1 or labels.dtype.kind not in "iu":
            raise DataError(
                f"{path}: labels are {labels.dtype} {list(labels.shape)}, expected classes as "
                "integers [n]"
            )
        lengths["label"] = len(labels)
    if len(set(lengths.values())) != 1:
        raise DataError(f"{path}: arrays differ in length: {lengths}; every sample needs all")


def _check_finite(path: Path, name: str, array: NDArray[Any]) -> None:
    if array.dtype.kind != "f":
        return
    bad = ~np.isfinite(array.reshape(len(array), -1)).all(axis=1)
    if bad.any():
        first = int(np.flatnonzero(bad)[0])
        raise DataError(
            f"{path}: input {name!r} has NaN or infinite values in {int(bad.sum())} of "
            f"{len(array)} samples, first in sample {first}; remove or mend them"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSplit:
    """The training, tuning and certify splits of a data set; every sample is in one of them."""

    train: Dataset
    """Trains the heads."""
    tune: Dataset
    """Chooses heads, active exits, and the path of policies."""
    certify: Dataset
    """Finds how far along the path the promise holds; nothing else ever sees it."""


TUNE_SHARE, CERTIFY_SHARE = 0.15, 0.25
"""The shares of the data that do not train: heads gain most from more data, while certification
flattens beyond some 5,000 samples."""


def split(dataset: Dataset, *, certify_at_least: int, seed: int) -> DataSplit:
    """Split a data set at random.

    ``certify_at_least`` are the samples without which not even a policy that never errs can be
    certified (:func:`offramp.certify.learn_then_test.samples_needed`); a ``DataError`` says how
    many samples are needed where there are too few.
    """
    samples = len(dataset)
    sizes = _sizes(samples, certify_at_least)
    if sizes is None:
        needed = next(n for n in itertools.count(samples + 1) if _sizes(n, certify_at_least))
        raise DataError(
            f"{samples} calibration samples are too few: the promise alone needs "
            f"{certify_at_least}, and heads must be trained on others; give at least "
            f"{needed} (10,000 serve well), or relax --max-disagreement or --confidence"
        )
    order = np.random.default_rng(seed).permutation(samples)
    train, tune, certify = (dataset.subset(np.sort(p)) for p in np.split(order, np.cumsum(sizes)))
    return DataSplit(train=train, tune=tune, certify=certify)


def _sizes(samples: int, certify_at_least: int) -> tuple[int, int] | None:
    """Count the samples to train and tune with, the others certify; ``None`` if too few for it."""
    certify = max(round(samples * CERTIFY_SHARE), certify_at_least)
    tune = round(samples * TUNE_SHARE)
    train = samples - certify - tune
    return (train, tune) if train >= max(certify, 2) and tune >= 1 else None
