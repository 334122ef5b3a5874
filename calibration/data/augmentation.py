"""Data augmentation: more samples to train heads on, made from real ones and labelled by the model.

A head imitates the source model, so any input that the model accepts is a training sample: no human
labels are needed. Only training uses augmented samples; exits are tuned and certified on real ones,
so the promise does not depend on how realistic augmented samples are.

Measured on the Fashion-MNIST example (certified share of time saved on test data, seven candidate
exits, predicted from costs): no augmentation .749; shifts and flips .749; mixup .774; mixup of
shifted and flipped images .768; the two kinds of mixup together .785, but with one more pass of the
source model. So mixup is used, once; it also needs no knowledge of images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import TensorSpec
from offramp.calibration.data.dataset import Dataset

Method: TypeAlias = Literal["mixup", "splice"]
"""Methods to make samples. ``mixup``: convex combinations of two samples (Zhang et al., arXiv
1710.09412); ``splice``: the beginning of one token sequence and the end of another."""

MIXING = 0.4
"""Both parameters of the Beta distribution that mixup draws its weights from."""


def method_for(specs: Sequence[TensorSpec]) -> Method | None:
    """Choose how samples of a model can be made from others; ``None`` where no method fits.

    Continuous inputs are floats, and uint8 of three dimensions or more; tokens are integers
    [batch, tokens]. All inputs must be of one kind: if a model reads both kinds, the inputs of one
    sample belong together, but each kind would be joined in a different way.
    """
    kinds = [(np.dtype(spec.dtype), len(spec.shape)) for spec in specs]
    if all(dtype.kind == "f" or (dtype == np.uint8 and rank > 2) for dtype, rank in kinds):
        return "mixup"
    return "splice" if all(dtype.kind == "i" and rank == 2 for dtype, rank in kinds) else None


def makes_sense(method: Method, dataset: Dataset) -> bool:
    """Return whether samples of a data set can be joined: spliced inputs must have one length."""
    some = dataset.take(slice(1)).values()
    widths = {array.shape[1] for array in some if array.ndim == 2}
    return len(dataset) > 1 and (method == "mixup" or len(widths) == 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AugmentedSamples:
    """Samples that are each made from two real samples, computed when they are read."""

    base: Dataset
    method: Method
    first: NDArray[np.intp]
    """[n]: index in ``base`` of the first sample of each pair."""
    partner: NDArray[np.intp]
    """[n]: index in ``base`` of the other sample of each pair."""
    share: NDArray[np.float32]
    """[n]: contribution of the first sample of each pair, 0 to 1."""

    @classmethod
    def draw(cls, base: Dataset, method: Method, *, seed: int) -> AugmentedSamples:
        """Draw a partner for each sample of ``base``, and the share that the first contributes."""
        rng, samples = np.random.default_rng(seed), len(base)
        order = rng.permutation(samples)
        partner = np.empty(samples, np.intp)
        partner[order] = np.roll(order, 1)  # never the sample itself, unless there is only one
        mixed = method == "mixup"
        share = rng.beta(MIXING, MIXING, samples) if mixed else rng.uniform(size=samples)
        return cls(
            base=base,
            method=method,
            first=np.arange(samples, dtype=np.intp),
            partner=partner,
            share=share.astype(np.float32),
        )

    def __len__(self) -> int:
        return len(self.first)

    def subset(self, rows: NDArray[np.intp]) -> AugmentedSamples:
        """Return the made samples with these indices."""
        return replace(
            self, first=self.first[rows], partner=self.partner[rows], share=self.share[rows]
        )

    @property
    def rows(self) -> NDArray[np.intp]:
        """Row in the file of the first sample of each pair, [n], for messages."""
        return self.base.rows[self.first]

    def take(self, rows: slice | NDArray[np.intp]) -> dict[str, NDArray[Any]]:
        """Return the inputs of some samples."""
        return {name: self.column(name, rows) for name in self.base.inputs}

    def column(self, name: str, rows: slice | NDArray[np.intp] = slice(None)) -> NDArray[Any]:
        """Return one input of some samples."""
        if self.method == "splice":
            return self._spliced(name, rows)
        first, other = (self.base.column(name, of[rows]) for of in (self.first, self.partner))
        share = self.share[rows].reshape(-1, *(1,) * (first.ndim - 1))
        with np.errstate(invalid="ignore"):
            mixed = first * share + other * (1 - share)
        if first.dtype.kind == "f":
            # A mean with a missing or masked value is meaningless: the first sample's value stays.
            mixed = np.where(np.isfinite(first) & np.isfinite(other), mixed, first)
        return (np.rint(mixed) if first.dtype.kind == "u" else mixed).astype(first.dtype)

    def _spliced(self, name: str, rows: slice | NDArray[np.intp]) -> NDArray[Any]:
        """Join one sample's tokens before a random position to the other's tokens after it.

        All inputs of a pair are cut at the same position. The position is within the length of the
        first sample, where padding at the end of all inputs does not count.
        """
        first, other = (self.base.column(name, of[rows]) for of in (self.first, self.partner))
        inputs = np.stack([self.base.column(n, self.first[rows]) for n in self.base.inputs])
        used = np.any(inputs != 0, axis=0)  # padding is 0
        lengths = used.shape[1] - used[:, ::-1].argmax(axis=1)
        behind = np.arange(first.shape[1]) >= np.ceil(self.share[rows] * lengths)[:, None]
        return np.where(behind, other, first)
