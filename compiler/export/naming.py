"""Names in an exported file: what a caller sees, and what must not clash with it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from offramp.bundle import Manifest
from offramp.engine.plan import Plan

EXIT, CONFIDENCE = "exit", "confidence"
"""Outputs of ``--with-exits``."""
_OURS = "offramp_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The names that exporting adds to those of the model."""

    exit: str
    """Output, int32 [batch]: index of the exit that answered, -1 at the model's end."""
    confidence: str
    """Output, float32 [batch]: confidence of the answer."""
    thresholds: tuple[str, ...]
    """Optional inputs, float32 scalars: least confidence to exit with, in depth order."""
    inner: str
    """What every other name begins with."""

    @classmethod
    def of(cls, manifest: Manifest, plan: Plan) -> Names:
        """Choose names that no input or output of the model has.

        The outputs are called ``exit`` and ``confidence``. If the model has an input or output
        of one of these names, both are called ``offramp_exit`` and ``offramp_confidence``; should
        the model have one of these as well, ``offramp_`` is put in front once more.
        """
        taken = {tensor.name for tensor in (*manifest.inputs, *manifest.outputs)}
        shown = _free((EXIT, CONFIDENCE), taken)
        thresholds = _free([f"{_OURS}threshold_{index}" for index in plan.exits], taken)
        inner = _OURS
        while any(name.startswith(inner) for name in (*taken, *shown, *thresholds)):
            inner = f"{inner}_"
        return cls(exit=shown[0], confidence=shown[1], thresholds=tuple(thresholds), inner=inner)


def _free(wanted: Iterable[str], taken: set[str]) -> list[str]:
    names = list(wanted)
    while not taken.isdisjoint(names):
        names = [f"{_OURS}{name}" for name in names]
    return names
