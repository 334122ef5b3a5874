"""Bundles to build engines of, made without training: their exits have random weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import ActiveExit, Bundle, ExitPolicy, InputRanges
from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend
from offramp.engine.stages.plan import make_plan
from offramp.tools.gpu.staged import plain_bundle
from tests.sliced import inputs_of, sliced


def engine_bundle(
    model: str,
    path: Path,
    *,
    exits_after: Sequence[int] = (0, 1),
    active: Sequence[ActiveExit] = (ActiveExit(exit=1, threshold=0.5),),
) -> Bundle:
    """Write a bundle of a model of tests/sliced.py.

    Args:
        model: Its name there.
        path: Where to.
        exits_after: Segments that get an exit.
        active: The policy.
    """
    pieces = sliced(model)
    inputs = inputs_of(pieces, 256)
    return plain_bundle(
        pieces,
        path,
        inputs,
        exits_after=exits_after,
        active=active,
        ranges=InputRanges.of(inputs),
    )


def half_leave(bundle: Bundle, inputs: dict[str, NDArray[Any]]) -> ExitPolicy:
    """The bundle's policy with a threshold at which half of some inputs leave at the first exit."""
    stage = make_plan(bundle).stages[0]
    backend = OnnxRuntimeBackend()
    slot = backend.open_slot()
    found = np.sort(slot.run(backend.prepare(stage), slot.upload(inputs)).confidence)
    middle = float(found[len(found) // 2 - 1 : len(found) // 2 + 1].mean())
    assert found[0] < middle < found[-1]
    first, *others = bundle.policy.active
    return replace(bundle.policy, active=(replace(first, threshold=middle), *others))
