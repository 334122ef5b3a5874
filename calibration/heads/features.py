"""Records the features that heads are trained on, once.

ONNX Runtime pools maps to grids with the operators that will be served. Vectors are stored whole,
tokens as their principal components, from which heads learn equally well; the head's first layer
and queries undo that transformation. Features are float16 in files that are mapped into memory,
since tokens of a real data set take gigabytes; values beyond float16's range are clipped.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Answer
from offramp.bundle.npz import release_pages
from offramp.calibration.data.augmentation import AugmentedSamples
from offramp.calibration.data.dataset import DataError, Dataset
from offramp.calibration.data.running import BATCH_SIZE, Graphs, check_answers, run_over
from offramp.calibration.heads.cut_tensors import CutTensor
from offramp.calibration.heads.preconditioning import LARGEST, SAMPLES, Preconditioner
from offramp.engine.answers.agreement import agreement_of

_log = logging.getLogger(__name__)

_FLOAT16_MAX = 65504.0

FULL_TENSOR = 0
"""Key of a tensor that is recorded unchanged; it is used in place of a grid's size."""
LAST = -1
"""Key of the last token that is not padding; it is used in place of a grid's size."""
TOKEN_COMPONENTS = 128
"""Largest number of principal components of tokens that are stored."""
_PROJECTED_SAMPLES = 256
"""Largest number of samples from which components of tokens are estimated."""

Projections: TypeAlias = Mapping[int, Preconditioner]
"""Transformation of tokens to coordinates, by candidate; tokens of other candidates are stored
unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The recorded features of every candidate exit, and the source model's answers."""

    features: tuple[Mapping[int, NDArray[np.float16]], ...]
    """Features per candidate, by grid: [n, channels · grid^sides]; by :data:`FULL_TENSOR`:
    [n, tokens, width] or [n, width]; by :data:`LAST`: [n, width]."""
    masks: Mapping[str, NDArray[Any]]
    """Masks that heads use, by graph input: [n, tokens]."""
    answers: NDArray[np.float32]
    """[n, classes]: the source model's answers."""
    projections: Projections = field(default_factory=dict)
    """Transformations by candidate, where tokens are stored as coordinates."""

    def subset(self, rows: slice | NDArray[np.intp]) -> Recording:
        """Return some samples; a slice is not copied."""
        return replace(
            self,
            features=tuple({key: v[rows] for key, v in e.items()} for e in self.features),
            masks={name: mask[rows] for name, mask in self.masks.items()},
            answers=self.answers[rows],
        )


def record(
    model: Graphs,
    outputs: tuple[Mapping[int, str], ...],
    answer: Answer,
    dataset: Dataset,
    *,
    made: AugmentedSamples | None = None,
    projections: Projections | None = None,
    masks: Collection[str] = (),
    threads: int,
    directory: Path,
    progress: Callable[[int], None] = lambda _: None,
) -> Recording:
    """Run the source model with all poolings attached over a data set.

    ``model`` is the joined graph of segments and poolings, in a cascade followed by the source
    model; ``outputs`` has, for each candidate, the names of its outputs by grid; ``masks`` are
    further graph inputs that heads read. ``made`` samples are recorded after the others; if the
    source model fails on one or has no finite answer, the sample that it was made from is repeated
    in its place. (For a sample of the data set, that is a ``DataError``.) Files are put in
    ``directory``, which the caller removes; ``progress`` is called with the number of samples of
    each finished batch.
    """
    made_rows = 0 if made is None else len(made)
    store = _FeatureStore(
        directory=directory,
        names=[name for per_exit in outputs for name in per_exit.values()],
        projected={
            outputs[candidate][FULL_TENSOR]: p for candidate, p in (projections or {}).items()
        },
        answers=np.full((len(dataset) + made_rows, answer.classes), np.nan, np.float32),
        progress=progress,
    )
    directory.mkdir(exist_ok=True)
    read = _masks(directory, masks, dataset, made)
    wanted = [answer.output, *store.names]
    for rows, (answered, *values) in run_over(model, wanted, dataset, threads=threads):
        check_answers(answered, dataset.rows[rows], answer)
        store.keep(0, rows, answered, values)
    if made is not None:
        try:
            for rows, (answered, *values) in run_over(model, wanted, made, threads=threads):
                store.keep(len(dataset), rows, answered, values)
        except DataError as error:
            _log.warning("Heads train without some of the augmented samples: %s.", error)
    # Samples that the model cannot answer are replaced by those that they were made from.
    bad = np.flatnonzero(~agreement_of(answer).decided(store.answers))
    if made is not None and len(bad):
        arrays: list[NDArray[Any]] = [store.answers, *store.files.values(), *read.values()]
        for array in arrays:
            array[bad] = array[made.first[bad - len(dataset)]]
    return Recording(
        features=tuple({grid: store.files[name] for grid, name in e.items()} for e in outputs),
        masks=read,
        answers=store.answers,
        projections=projections or {},
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _FeatureStore:
    """The files that features are recorded to; they are created with the first values."""

    directory: Path
    names: Sequence[str]
    """Names of the graph's outputs, which are recorded."""
    projected: Mapping[str, Preconditioner]
    """Transformation of tokens to coordinates, by output."""
    answers: NDArray[np.float32]
    progress: Callable[[int], None]
    files: dict[str, NDArray[np.float16]] = field(default_factory=dict)

    def keep(
        self, start: int, rows: slice, answered: NDArray[Any], values: Sequence[NDArray[Any]]
    ) -> None:
        """Store a batch's answers and values; sample i of the data goes to row ``start`` + i."""
        place = slice(start + rows.start, start + rows.stop)
        self.answers[place] = answered
        stored = {n: self._stored(n, value) for n, value in zip(self.names, values, strict=True)}
        if not self.files:
            self._make_files({n: (len(self.answers), *v.shape[1:]) for n, v in stored.items()})
        for name, value in stored.items():
            self.files[name][place] = np.clip(value, -_FLOAT16_MAX, _FLOAT16_MAX)
            release_pages(self.files[name])
        self.progress(len(answered))

    def _stored(self, name: str, value: NDArray[Any]) -> NDArray[Any]:
        if (projection := self.projected.get(name)) is None:
            return value
        flat = projection.apply(value.reshape(-1, value.shape[2]))  # tokens [b, tokens, width]
        return flat.reshape(*value.shape[:2], -1)

    def _make_files(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Create all files at their full size, so that a full disk is detected at the start."""
        try:
            for index, (name, shape) in enumerate(shapes.items()):
                self.files[name] = _new_file(self.directory / f"{index}.npy", np.float16, shape)
        except OSError as error:
            size = sum(math.prod(shape) for shape in shapes.values()) * 2 / 2**20
            raise DataError(
                f"features of {len(self.answers)} samples take {size:,.0f} MiB in "
                f"{self.directory}: {error.strerror}; free the space, name a folder that has it by "
                "--scratch, or bound them by --scratch-limit"
            ) from error


def _new_file(path: Path, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    """Map a new file with reserved disk space and no name; OSError if the disk is full."""
    mapped: NDArray[Any] = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
    _reserve(path)
    _forget(path)
    return mapped


def _reserve(path: Path) -> None:
    """Reserve disk space for a whole file; OSError if the disk is full.

    A new mapped file has no space reserved, and a write to memory without space on the disk kills
    the process (SIGBUS).
    """
    if hasattr(os, "posix_fallocate"):  # macOS has none
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


def _forget(path: Path) -> None:
    """Remove the name of a mapped file, so that its space is released with the last mapping.

    This works even if the process is killed and cannot clean up.
    """
    with contextlib.suppress(PermissionError):  # Windows does not remove open files
        path.unlink()


def sample_sizes(
    model: Graphs,
    outputs: tuple[Mapping[int, str], ...],
    cuts: Sequence[CutTensor],
    dataset: Dataset,
    *,
    threads: int,
) -> list[int]:
    """Return the bytes of one sample's features, by candidate, by running the first sample.

    ``model`` and ``outputs`` are as for :func:`record`. Wide tokens are counted as the maximum
    number of components that :func:`fit_projections` keeps.
    """
    wide = set(_wide_tokens(outputs, cuts))
    names = [name for per_exit in outputs for name in per_exit.values()]
    first = dataset.subset(np.arange(1, dtype=np.intp))
    (_, values), *_ = run_over(model, names, first, threads=threads)
    shapes = {name: value.shape[1:] for name, value in zip(names, values, strict=True)}

    def values_of(candidate: int, key: int, shape: tuple[int, ...]) -> int:
        projected = candidate in wide and key == FULL_TENSOR
        return math.prod((*shape[:-1], TOKEN_COMPONENTS) if projected else shape)

    itemsize = np.dtype(np.float16).itemsize
    return [
        itemsize * sum(values_of(candidate, key, shapes[name]) for key, name in e.items())
        for candidate, e in enumerate(outputs)
    ]


def fit_projections(
    model: Graphs,
    outputs: tuple[Mapping[int, str], ...],
    cuts: Sequence[CutTensor],
    dataset: Dataset,
    *,
    threads: int,
    progress: Callable[[int], None] = lambda _: None,
) -> Projections:
    """Fit the principal components of wide tokens; ``outputs`` are as for :func:`record`.

    ``progress`` is called with the number of samples of each finished batch, of
    :func:`projected_samples`.
    """
    wide = _wide_tokens(outputs, cuts)
    if not wide:
        return {}
    part = dataset.subset(_projected_rows(len(dataset)))
    names = [outputs[candidate][FULL_TENSOR] for candidate in wide]
    some = {candidate: _SomeTokens(part, cuts[candidate].mask) for candidate in wide}
    for rows, values in run_over(model, names, part, threads=threads):
        for candidate, value in zip(wide, values, strict=True):
            some[candidate].add(rows, value)
        progress(rows.stop - rows.start)
    fitted = {
        candidate: Preconditioner.fit(np.concatenate(of.kept), components=TOKEN_COMPONENTS)
        for candidate, of in some.items()
    }
    return {candidate: found for candidate, found in fitted.items() if found.matrix.ndim == 2}


def projected_samples(
    outputs: tuple[Mapping[int, str], ...], cuts: Sequence[CutTensor], samples: int
) -> int:
    """Return how many of ``samples`` :func:`fit_projections` runs; 0 without wide tokens."""
    return len(_projected_rows(samples)) if _wide_tokens(outputs, cuts) else 0


def _projected_rows(samples: int) -> NDArray[np.intp]:
    return np.arange(0, samples, -(-samples // _PROJECTED_SAMPLES), dtype=np.intp)


class _SomeTokens:
    """A sample of the tokens that count, evenly spaced, to which components are fitted."""

    def __init__(self, samples: Dataset, mask: str | None) -> None:
        self.kept: list[NDArray[np.float32]] = []
        """Tokens of each batch, [some, width]."""
        counts = None if mask is None else samples.column(mask, slice(None)) > 0
        # A mask that marks no token is of another kind, for example with 0 and minus infinity.
        self._counts = counts if counts is not None and counts.any() else None
        self._samples, self._seen = len(samples), 0

    def add(self, rows: slice, tokens: NDArray[Any]) -> None:
        """Add some of the tokens [b, tokens, width] of a batch."""
        width = tokens.shape[2]
        if self._counts is None:
            total, new = self._samples * tokens.shape[1], tokens.reshape(-1, width)
        else:
            total, new = int(self._counts.sum()), tokens[self._counts[rows]]
        step = -(-total // SAMPLES)
        self.kept.append(new[-self._seen % step :: step].astype(np.float32))
        self._seen += len(new)


def _wide_tokens(outputs: tuple[Mapping[int, str], ...], cuts: Sequence[CutTensor]) -> list[int]:
    """Return the candidates whose tokens are worth projecting."""
    return [
        candidate
        for candidate, (cut, names) in enumerate(zip(cuts, outputs, strict=True))
        if cut.form == "tokens" and names and TOKEN_COMPONENTS < cut.width <= LARGEST
    ]


def _masks(
    directory: Path, names: Collection[str], dataset: Dataset, made: AugmentedSamples | None
) -> dict[str, NDArray[Any]]:
    """Copy masks to files, by name; DataError if the disk is full."""
    try:
        return {
            name: _mask(directory / f"mask-{index}.npy", name, dataset, made)
            for index, name in enumerate(names)
        }
    except OSError as error:
        raise DataError(
            f"the masks of the samples, in {directory}: {error.strerror}; free the space, or name "
            "a folder that has it by --scratch"
        ) from error


def _mask(path: Path, name: str, dataset: Dataset, made: AugmentedSamples | None) -> NDArray[Any]:
    """Copy a mask [n, tokens] to a new file; rows of augmented samples are after the others."""
    total = len(dataset) + (0 if made is None else len(made))
    first = dataset.column(name, slice(1))
    mask = _new_file(path, first.dtype, (total, *first.shape[1:]))
    start = 0
    for part in (dataset,) if made is None else (dataset, made):
        for begin in range(0, len(part), BATCH_SIZE):
            found = part.column(name, slice(begin, begin + BATCH_SIZE))
            mask[start : start + len(found)] = found
            start += len(found)
            release_pages(mask)
    return mask
