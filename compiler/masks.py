"""Which graph input says what tokens count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offramp.bundle import TensorSpec
from offramp.compiler.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """A graph input [batch, tokens], 1 where a token counts and 0 where it pads."""

    name: str
    dtype: str
    tokens: int | str
    """Size of the second dimension, maybe symbolic."""


def find_mask(
    inputs: Sequence[TensorSpec], main_inputs: Sequence[str], named: str | None
) -> Mask | None:
    """Find the mask: the one that the user named, or the one side input called a mask.

    Raises:
        ModelError: The input named is not there, or is not [batch, tokens].
    """
    shaped = {spec.name: spec for spec in inputs if len(spec.shape) == 2}
    if named is not None:
        if named not in shaped:
            known = "; ".join(spec.describe() for spec in inputs)
            raise ModelError(
                f"--mask {named!r} is not an input of shape [batch, tokens]; inputs are {known}"
            )
        return _mask(shaped[named])
    found = [s for n, s in shaped.items() if "mask" in n.lower() and n not in main_inputs]
    return _mask(found[0]) if len(found) == 1 else None


def _mask(spec: TensorSpec) -> Mask:
    return Mask(name=spec.name, dtype=spec.dtype, tokens=spec.shape[1])
