"""Simplification by onnxslim, accepted only if nothing changed."""

from __future__ import annotations

import logging

import onnx
import onnxslim

from offramp.compiler.runtime import Runner, random_inputs, relative_difference

_log = logging.getLogger(__name__)

_TOLERANCE = 1e-4
"""Relative: folding a BatchNormalization into the weights of its Conv rounds them anew."""
_BATCH = 2


def simplified(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Fold constants and fuse; the raw graph of an export can hide most of its cut points.

    Args:
        proto: A model with a symbolic batch; it is not changed.

    Returns:
        The simplified model, or ``proto`` itself, with a warning logged, where onnxslim fails
        or its result differs on random inputs.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    try:
        slim: onnx.ModelProto = onnxslim.slim(copy)
        onnx.checker.check_model(slim)
        difference = _difference(proto, slim)
    except Exception as error:  # whatever a third party's optimiser raises
        _log.warning("not simplified: onnxslim fails: %s", error)
        return proto
    if not difference <= _TOLERANCE:
        _log.warning("not simplified: onnxslim changes the outputs by %.1e", difference)
        return proto
    return slim


def _difference(proto: onnx.ModelProto, slim: onnx.ModelProto) -> float:
    """Largest relative difference of any output; infinite if inputs or outputs changed."""
    before, after = Runner(proto), Runner(slim)
    if set(after.inputs) - set(before.inputs) or before.outputs != after.outputs:
        return float("inf")
    feeds = random_inputs(proto, _BATCH)
    wanted, actual = before.run(feeds), after.run(feeds)
    return max(relative_difference(actual[name], wanted[name]) for name in wanted)
