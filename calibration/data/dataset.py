"""Data sets: one array for each model input, and labels where there are any.

Large arrays stay on the disk, and only the parts in use are read.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Answer, Manifest, TensorSpec, UnreadInput
from offramp.bundle.npz import copy_rows
from offramp.bundle.schema.inputs import declared_inputs
from offramp.calibration.data.data_sources import DataSource, numpy_source
from offramp.calibration.data.errors import DataError as DataError  # noqa: PLC0414 - exported again
from offramp.calibration.data.groups import Groups
from offramp.calibration.data.key import GroupKey, group_hint
from offramp.calibration.data.scratch import ScratchSpace
from offramp.certify.binomial import split_sizes
from offramp.engine.answers.agreement import agreement_of
from offramp.engine.common.validation import check_tensors

_log = logging.getLogger(__name__)

LABEL_KEYS = ("label", "labels")
"""Names of the array with the true classes in an npz file, int [n]."""
_BLOCK_BYTES: Final = 2**24
"""Bytes of an array that are checked together."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InputView(Mapping[str, NDArray[Any]]):
    """The inputs of some samples of a data set, without a copy.

    An input is copied when it is read as a whole; :meth:`Dataset.take` copies the rows it returns.
    """

    whole: Mapping[str, NDArray[Any]]
    """Inputs of all samples of the data set, by name."""
    rows: NDArray[np.intp]

    def __getitem__(self, name: str) -> NDArray[Any]:
        return copy_rows(self.whole[name], self.rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self.whole)

    def __len__(self) -> int:
        return len(self.whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Samples in the format of the model's inputs, with their labels where there are any."""

    inputs: Mapping[str, NDArray[Any]]
    """Arrays by input name, with first dimension n; mapped from files if the data are large."""
    labels: NDArray[np.int64] | None
    """[n]: true classes, only for reporting accuracy."""
    sha256: str
    """Hash of the file, or of all files in a folder, for the manifest."""
    group: NDArray[np.int64] | None = None
    """[n]: group numbers from the user's key; ``None`` without a key."""
    copies: NDArray[np.int64] | None = None
    """[n]: number of rows of the file that each sample represents; ``None`` means one row each."""
    taken: NDArray[np.intp] | None = None
    """[n]: index in the file of each sample's row; ``None`` means all rows of the file."""

    @property
    def rows(self) -> NDArray[np.intp]:
        """Row of each sample in the file, [n], for messages."""
        return np.arange(len(self)) if self.taken is None else self.taken

    def __len__(self) -> int:
        if isinstance(self.inputs, InputView):
            return len(self.inputs.rows)
        return len(next(iter(self.inputs.values())))

    def subset(self, rows: NDArray[np.intp]) -> Dataset:
        """Return some samples as a data set (of the same file), without copying their inputs."""
        labels = None if self.labels is None else self.labels[rows]
        group = None if self.group is None else self.group[rows]
        copies = None if self.copies is None else self.copies[rows]
        inputs = InputView(whole=self.inputs, rows=rows)
        if isinstance(self.inputs, InputView):
            inputs = InputView(whole=self.inputs.whole, rows=self.inputs.rows[rows])
        return replace(
            self, inputs=inputs, labels=labels, group=group, copies=copies, taken=self.rows[rows]
        )

    def distinct(self, rows: NDArray[np.intp], groups: Groups) -> Dataset:
        """Return some rows as distinct samples, each representing all rows of its group."""
        return replace(self.subset(rows), copies=groups.copies(rows))

    def take(self, rows: slice | NDArray[np.intp]) -> dict[str, NDArray[Any]]:
        """Return copies of the inputs of some samples, by input name."""
        return {name: self.column(name, rows) for name in self.inputs}

    def column(self, name: str, rows: slice | NDArray[np.intp]) -> NDArray[Any]:
        """Return one input of some samples."""
        if isinstance(self.inputs, InputView):
            return copy_rows(self.inputs.whole[name], self.inputs.rows[rows])
        return copy_rows(self.inputs[name], rows)

    def not_finite(self) -> NDArray[np.intp]:
        """Return the indices of samples, [k], with NaN or infinity in an input."""
        found = np.zeros(len(self), np.bool_)
        for name in self.inputs:
            one = self.column(name, slice(1))
            if one.dtype.kind != "f" or not one.size:
                continue
            size = max(1, _BLOCK_BYTES // one.nbytes)
            for start in range(0, len(self), size):
                rows = slice(start, min(start + size, len(self)))
                finite = np.isfinite(self.column(name, rows))
                found[rows] |= ~finite.reshape(len(finite), -1).all(axis=1)
        return np.flatnonzero(found)

    def batches(self, size: int = 64) -> Iterator[dict[str, NDArray[Any]]]:
        """Yield the inputs of all samples, in batches of ``size``."""
        for start in range(0, len(self), size):
            yield self.take(slice(start, start + size))


def read_dataset(
    source: Path | DataSource,
    specs: Sequence[TensorSpec],
    *,
    unread: Sequence[UnreadInput] = (),
    answer: Answer | None = None,
    group: GroupKey | None = None,
    scratch: ScratchSpace | None = None,
) -> Dataset:
    """Read samples from a source, and check them against the model's inputs.

    A path leads to an npz file or a folder of npy files; sources of other kinds are in
    :mod:`offramp.compiler.data`. Large data are mapped, not read into memory: the files must not
    change while they are in use. Converted or unpacked arrays are written to an unnamed file in
    ``scratch`` (``None``: the system's folder for temporary files).

    The array ``label`` or ``labels`` contains the classes. For models whose ``answer`` is not a
    class, the array contains sets of labels [n, labels], or is ignored. The data may contain inputs
    that no operator reads (``unread``): they are checked, then ignored. The array that ``group``
    names is not an input: rows with equal values in it form one group.

    Raise a ``DataError`` if the source cannot be read, an array's name, dtype or shape does not fit
    the model, or arrays have different lengths. Values may be NaN or infinite: running the model
    shows whether it answers such samples (:func:`.data.running.check_unusual`).
    """
    source = numpy_source(source) if isinstance(source, Path) else source
    keys = () if group is None else (group.key,)
    arrays, digest = source.load(specs, scratch or ScratchSpace(), keys=keys)
    name = source.name
    names = {spec.name for spec in specs}
    found = [key for key in LABEL_KEYS if key in arrays and key not in names]
    if len(found) > 1:
        raise DataError(f"{name}: has both {' and '.join(found)}; keep one of them")
    labels = arrays.pop(found[0]) if found else None
    aside = frozenset(each.spec.name for each in unread)
    try:
        groups = None if group is None else group.take(arrays, names)
    except ValueError as error:
        raise DataError(f"{name}: {error}") from error
    rename = _only_input(specs, arrays)
    if rename and len(arrays) == 1:
        arrays = {specs[0].name: arrays[rename]}
    if wrong := check_tensors(declared_inputs(specs, unread), arrays, unread=aside, batched=True):
        hint = group_hint(arrays, names | aside)
        if rename and len(arrays) > 1:
            hint = f"; {rename!r} would fit: save it as {specs[0].name!r}, alone or with labels"
        raise DataError(f"{name}: {wrong}{hint}")
    arrays = {key: array for key, array in arrays.items() if key not in aside}
    if labels is not None and labels.ndim == 0:
        raise DataError(f"{name}: labels are one number, expected one for each sample")
    _check_lengths(name, arrays, labels)
    truth = None if labels is None else _codes_of(name, labels, answer)
    return Dataset(inputs=arrays, labels=truth, group=groups, sha256=digest)


def _only_input(specs: Sequence[TensorSpec], arrays: Mapping[str, NDArray[Any]]) -> str:
    """Return the only array that fits a model's only input, if no array has the input's name."""
    if len(specs) != 1 or specs[0].name in arrays:
        return ""
    fitting = [n for n, a in arrays.items() if check_tensors(specs, {specs[0].name: a}) is None]
    return fitting[0] if len(fitting) == 1 else ""


def _check_lengths(
    where: str, arrays: Mapping[str, NDArray[Any]], labels: NDArray[Any] | None
) -> None:
    lengths = {name: len(array) for name, array in arrays.items()}
    if labels is not None:
        lengths["label"] = len(labels)
    if len(set(lengths.values())) != 1:
        raise DataError(f"{where}: arrays differ in length: {lengths}; every sample needs all")


def read_samples(
    source: Path | DataSource, manifest: Manifest, *, group: str | None = None
) -> Dataset:
    """Read samples for the model of a bundle, as :func:`read_dataset` does.

    ``group`` is by default the array that grouped rows at compilation, if the data have it.
    """
    known, group_key = manifest.calibration.distinct, None
    if group is not None:
        group_key = GroupKey(key=group)
    elif known is not None and known.key is not None:
        group_key = GroupKey(key=known.key, needed=False)
    return read_dataset(
        source, manifest.inputs, unread=manifest.unread, answer=manifest.answer, group=group_key
    )


def _codes_of(where: str, labels: NDArray[Any], answer: Answer | None) -> NDArray[np.int64] | None:
    """Return labels as codes of answers, [n]; ``None`` if they are not classes or label sets."""
    kind = "classification" if answer is None else answer.task.kind
    found = f"{where}: labels are {labels.dtype} {list(labels.shape)}"
    if kind == "classification":
        if labels.ndim != 1 or labels.dtype.kind not in "iu":
            raise DataError(
                f"{found}, expected classes as integers [n]; convert them, or omit "
                "them: exits do not need labels"
            )
        if (
            answer is not None
            and len(labels)
            and not 0 <= labels.min() <= labels.max() < answer.classes
        ):
            _log.warning(
                "%s: labels go from %d to %d, the model's classes from 0 to %d: samples with other "
                "labels count as wrong.",
                where, labels.min(), labels.max(), answer.classes - 1,
            )  # fmt: skip
        return np.array(labels, np.int64)
    if kind == "multi-label" and answer is not None:
        if answer.flat and labels.ndim == 1:
            labels = labels[:, None]
        if labels.ndim != 2 or labels.shape[1] != answer.classes or labels.dtype.kind not in "biu":
            raise DataError(
                f"{found}, expected 0 or 1 for each label, integers [n, {answer.classes}]; omit "
                "the labels if the samples have none"
            )
        if len(labels) and not 0 <= labels.min() <= labels.max() <= 1:
            raise DataError(
                f"{where}: labels go from {labels.min()} to {labels.max()}, expected 0 or 1 each; "
                "omit the labels if the samples have none"
            )
        return agreement_of(answer).codes(np.asarray(labels) != 0).astype(np.int64)
    _log.info("%s, and are ignored: accuracy is only reported for classes and labels.", found)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSplit:
    """The training, tuning and certify splits of a data set; each group is in only one."""

    train: Dataset
    """Split that heads are trained on; it has all rows of its groups."""
    tune: Dataset
    """Split that heads, active exits and the path of policies are chosen on; it has one row per
    group."""
    certify: Dataset
    """Split that the path of policies is tested on; it is used for nothing else. It has one row per
    group, as the promise is about distinct samples."""
    groups: Groups
    """Groups of dependent rows, over the whole data set."""

    def distinct_train(self) -> Dataset:
        """Return one row for each group of the training split."""
        return self.train.subset(np.flatnonzero(self.groups.represents[self.train.rows]))


def split(
    dataset: Dataset, *, certify_at_least: int, seed: int, groups: Groups | None = None
) -> DataSplit:
    """Split a data set at random, by groups (default: each row is its own group).

    ``certify_at_least`` is the smallest number of samples with which a policy without errors can be
    certified (:func:`offramp.certify.binomial.samples_needed`). If there are too few samples, a
    ``DataError`` states how many are needed.
    """
    groups = groups or Groups.singletons(len(dataset))
    return part(dataset, groups, sizes_of(groups, certify_at_least), seed=seed)


def sizes_of(groups: Groups, certify_at_least: int) -> tuple[int, int]:
    """Return the numbers of groups that train and tune; DataError if there are too few groups."""
    samples = len(groups)
    sizes = split_sizes(samples, certify_at_least)
    if sizes is None:
        needed = next(n for n in itertools.count(samples + 1) if split_sizes(n, certify_at_least))
        raise DataError(_too_few(groups, needed, certify_at_least))
    return sizes


def part(dataset: Dataset, groups: Groups, sizes: tuple[int, int], *, seed: int) -> DataSplit:
    """Split a data set at random, by its groups.

    ``sizes`` are the numbers of groups in ``train`` and in ``tune``; all other groups are in
    ``certify``. The same data, groups, sizes and seed produce the same parts.
    """
    order = groups.shuffled(seed)
    train, tune, certify = (np.sort(rows) for rows in np.split(order, np.cumsum(sizes)))
    return DataSplit(
        train=dataset.subset(groups.apart(groups.members(groups.number[train]), order[sizes[0] :])),
        tune=dataset.distinct(tune, groups),
        certify=dataset.distinct(certify, groups),
        groups=groups,
    )


def _too_few(groups: Groups, needed: int, certify_at_least: int) -> str:
    """Return the message that there are too few samples, and the remedies."""
    found, remedy = f"{len(groups)} calibration samples are too few", ""
    if groups.joins:
        found = (
            f"{len(groups)} distinct calibration samples are too few ({groups.rows} rows, of which "
            f"{'; '.join(groups.found)}, so that they are not independent)"
        )
        remedy = (
            ". If rows that are nearly the same, overlap or resemble each other are nevertheless "
            "independent samples, add --copies-within 0"
        )
    return (
        f"{found}: the promise alone needs {certify_at_least}, and heads must be trained on "
        f"others; give at least {needed} (10,000 serve well), or relax --max-disagreement or "
        f"--confidence{remedy}"
    )
