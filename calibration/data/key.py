"""The array of a data file that states which samples belong together."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupKey:
    """Name of the array, as passed to ``--group``."""

    key: str
    needed: bool = True
    """True if data without the array are refused."""

    def take(
        self, arrays: dict[str, NDArray[Any]], inputs: Collection[str]
    ) -> NDArray[np.int64] | None:
        """Return the array's values as numbers, int64[n], and remove the array from ``arrays``.

        An array that is also an input is not removed. The result is ``None`` if the array is
        missing and not needed. ValueError if it is missing and needed, or does not have one integer
        or text for each sample.
        """
        if self.key not in arrays:
            if not self.needed:
                return None
            others = ", ".join(sorted(arrays.keys() - set(inputs))) or "none"
            raise ValueError(
                f"--group {self.key}: there is no such array (arrays besides inputs: {others}); "
                "name one with an integer or a text for each sample"
            )
        values = arrays[self.key] if self.key in inputs else arrays.pop(self.key)
        rows = {len(array) for name, array in arrays.items() if name in inputs and array.ndim}
        if values.ndim != 1 or not _names(values) or rows - {len(values)}:
            raise ValueError(
                f"--group {self.key} is {values.dtype} {list(values.shape)}, expected an integer "
                "or a text for each sample, [n]"
            )
        return np.unique(values, return_inverse=True)[1].astype(np.int64)


def group_hint(arrays: Mapping[str, NDArray[Any]], inputs: Collection[str]) -> str:
    """Return the end of an error about arrays that are not inputs: one of them may group rows.

    Empty if none of them has an integer or a text for each sample.
    """
    rows = {len(array) for name, array in arrays.items() if name in inputs and array.ndim}
    for name, array in arrays.items():
        if name not in inputs and array.ndim == 1 and {len(array)} == rows and _names(array):
            return (
                f"; if {name!r} states which rows belong together, name it: --group {name} "
                "(eecompile, eecompile rehearse, eebench load)"
            )
    return ""


def _names(array: NDArray[Any]) -> bool:
    return array.dtype.kind in "biuSU"
