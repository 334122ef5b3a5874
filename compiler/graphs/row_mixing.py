"""Check whether a sample's answer depends on the other samples of its batch, and by which operator.

Exits shrink batches, and a server merges and splits them, so a sample's answer must not depend on
the rest of its batch. Samples (rows) are run one by one and in a batch. If their answers differ,
every operator is run as a separate model, on rows one by one and together. That finds the operators
that mix rows, and not the operators after them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from offramp.bundle import Answer
from offramp.compiler.common.errors import ModelError, listed
from offramp.compiler.common.rounding import SINGLE, rounding_of
from offramp.compiler.graphs.graph import Dataflow, Operator, copied, emptied
from offramp.compiler.graphs.runtime import GraphRunner, describe_shapes, random_inputs
from offramp.compiler.graphs.shapes import infer_types
from offramp.engine.answers.differences import Difference, Scales, compare, relative_difference

_log = logging.getLogger(__name__)

Arrays: TypeAlias = "Mapping[str, NDArray[Any]]"

_ROWS = 3
_MIXED = 5e-3
"""Relative difference above which an operator, run as a separate model, counts as mixing rows."""
_SHOWN = 3
_SCALED_BY_BATCH = frozenset(
    {"DynamicQuantizeLinear", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM"}
)
_MOVING = frozenset(
    {"Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Expand", "Identity", "Cast"}
)
"""Operators that compute no values. In a result of theirs, rows need not be contiguous."""
_OTHERWISE = "let it compute each sample separately"
_REMEDIES = {
    "BatchNormalization": "it normalises by the batch, as in training; call model.eval() before "
    "the export",
    "Random": "it draws at random; export the model for inference (model.eval())",
    "Reduce": "it reduces over the samples; let it reduce over other dimensions than the first, "
    "which has to be the batch in every input (recurrent networks: batch_first=True)",
}


def scaled_by_batch(proto: onnx.ModelProto) -> tuple[Operator, ...]:
    """Return the operators that round a row by the range of all rows of its batch.

    Dynamically quantised models have such operators: some answers of these models depend on the
    rest of the batch.
    """
    return tuple(op for op in Dataflow(proto.graph).changing if op.kind in _SCALED_BY_BATCH)


def check_rows(proto: onnx.ModelProto, feeds: Arrays | None = None) -> None:
    """Run some samples (rows) one by one and in a batch; by default they are random.

    If answers differ, the operators that compute across rows are searched. Operators whose rounding
    depends on all rows (:func:`scaled_by_batch`) are accepted; their effect is counted later.

    Raises:
        ModelError: Operators compute across rows of a batch, or rows cannot be run together.
    """
    feeds = random_inputs(proto, _ROWS) if feeds is None else feeds
    rows = len(next(iter(feeds.values())))
    try:
        runner = GraphRunner(proto)
        alone = [runner.run(_row(feeds, i)) for i in range(rows)]
    except RuntimeError as error:
        _log.warning(
            "samples alone and in a batch are not compared yet: random inputs (%s) fail: %s",
            describe_shapes({name: array[:1] for name, array in feeds.items()}),
            error,
        )
        return
    try:
        together = runner.run(feeds)
    except RuntimeError as error:
        raise ModelError(
            f"the model runs one sample, but not {rows} in a batch, though its first dimension is "
            f"dynamic; export it with an example of two samples or more. ONNX Runtime says: {error}"
        ) from error
    outputs = [(values, [one[name] for one in alone]) for name, values in together.items()]
    by_rows = all(_are_rows(*each) for each in outputs)
    difference = None
    if by_rows:
        found = (compare(values, np.concatenate(ones)) for values, ones in outputs)
        difference = max(found, key=lambda each: each.share)
        if difference.share <= SINGLE.batches:
            return
    structural = [op for op in _Rows(proto, feeds).mixing() if op.kind not in _SCALED_BY_BATCH]
    if structural:
        raise ModelError(_describe(structural, difference, rows))
    if not by_rows:
        raise ModelError(
            f"the output for {rows} samples is not {rows} times that for one: the first "
            "dimension of its output has to be the batch"
        )


def compare_batches(
    proto: onnx.ModelProto,
    samples: Arrays,
    answers: Mapping[int, NDArray[Any]],
    answer: Answer | None = None,
) -> None:
    """Compare answers to the same samples in batches of several sizes; ModelError if they differ.

    The samples of a batch are the middle ones of the next larger batch (:func:`middle`), so the
    larger batch has other samples on both sides. With ``answer``, a description of the answers,
    decisions are compared, too. Dynamically quantised models are skipped: their difference is
    counted later.
    """
    if scaled_by_batch(proto):
        return
    sizes, rounding = sorted(answers), rounding_of(proto)
    scales = Scales.of(answers[sizes[-1]])
    for size, larger in pairwise(sizes):
        same = answers[larger][middle(size, sizes[-1]) - middle(larger, sizes[-1])[0]]
        difference = compare(same, answers[size], scales=scales, answer=answer)
        if difference.share > rounding.batches:
            check_rows(
                proto, {name: array[: min(size, _ROWS) + 1] for name, array in samples.items()}
            )
            raise ModelError(
                f"{size} samples in a batch of {larger} have other answers than alone, "
                f"by {difference.describe()}; allowed are {rounding.batches:.0e} "
                f"({rounding.name}): let the model compute each sample separately"
            )


def middle(size: int, largest: int) -> NDArray[np.intp]:
    """Return the indices [size] of the middle samples of the largest batch."""
    return np.arange(size) + (largest - size) // 2


def _describe(mixing: list[Operator], difference: Difference | None, rows: int) -> str:
    """Return a message with the operators that mix rows, and the remedy."""
    shown = listed([op.label for op in mixing], _SHOWN)
    kind = next((k for k in _REMEDIES if mixing[0].kind.startswith(k)), "")
    apart = ", the number of answers too"
    if difference is not None:
        apart = f", by {difference.describe()}, allowed are {SINGLE.batches:.0e}"
    return (
        f"the answer of a sample depends on the other samples of its batch (found among {rows} "
        f"rows{apart}). It enters at {shown}: {_REMEDIES.get(kind, _OTHERWISE)}"
    )


def _row(arrays: Arrays, i: int) -> dict[str, NDArray[Any]]:
    return {name: array[i : i + 1] for name, array in arrays.items()}


def _are_rows(together: NDArray[Any], alone: list[NDArray[Any]]) -> bool:
    """Return whether the outputs for single samples have the shape of rows of the joint output."""
    shapes = {row.shape for row in alone}
    return shapes == {(1, *together.shape[1:])} and len(together) == len(alone)


class _Rows:
    """All tensors of a model, computed for some rows together and for each row alone."""

    def __init__(self, proto: onnx.ModelProto, feeds: Arrays) -> None:
        self._proto = proto
        self._flow = Dataflow(proto.graph)
        self._rows = len(next(iter(feeds.values())))
        exposed = _exposed(proto, self._flow)
        self._types = {o.name: o.type.tensor_type.elem_type for o in exposed.graph.output}
        runner = GraphRunner(exposed)
        self._together = {**feeds, **runner.run(feeds)}
        each = [_row(feeds, i) for i in range(self._rows)]
        self._alone = [{**row, **runner.run(row)} for row in each]
        self._constants = {t.name: t for t in proto.graph.initializer}

    def mixing(self) -> Iterator[Operator]:
        """Yield the operators that compute something else for a row alone than for all rows."""
        for op in self._flow.changing:
            if op.kind not in _MOVING and self._mixes(op):
                yield op

    def _mixes(self, op: Operator) -> bool:
        variable = [t for t in op.reads if t in self._flow.variable]
        if any(t not in self._together for t in variable):
            return False
        feeds = {t: self._together[t] for t in variable}
        rows = [{t: self._row_of(t, i) for t in variable} for i in range(self._rows)]
        if all(feeds[t].shape == rows[0][t].shape for t in variable):
            return False
        try:
            runner = GraphRunner(self._single(op, variable))
            whole, parts = runner.run(feeds), [runner.run(row) for row in rows]
        except (RuntimeError, ModelError):
            return False
        given = [t for t in op.writes if t in whole]
        return any(
            self._differs(whole[t], part[t], i) for i, part in enumerate(parts) for t in given
        )

    def _row_of(self, tensor: str, i: int) -> NDArray[Any]:
        """Return a tensor's values for one row.

        If the tensor has no rows, the whole tensor is returned; for integers, which may be sizes,
        the tensor that was computed for the row alone.
        """
        together, alone = self._together[tensor], self._alone[i][tensor]
        axis = self._axis(together, alone)
        if axis is not None:
            return _taken(together, axis, i, alone.shape[axis])
        return alone if together.dtype in (np.int32, np.int64) else together

    def _axis(self, together: NDArray[Any], alone: NDArray[Any]) -> int | None:
        if together.ndim != alone.ndim:
            return None
        axes = [i for i in range(together.ndim) if together.shape[i] != alone.shape[i]]
        fits = len(axes) == 1 and together.shape[axes[0]] == self._rows * alone.shape[axes[0]]
        return axes[0] if fits else None

    def _differs(self, whole: NDArray[Any], part: NDArray[Any], i: int) -> bool:
        if whole.dtype in (np.int32, np.int64):  # sizes, and values computed from them
            return False
        if whole.shape != part.shape:
            axis = self._axis(whole, part)
            if axis is None:
                return False
            whole = _taken(whole, axis, i, part.shape[axis])
        return not relative_difference(part, whole) <= _MIXED

    def _single(self, op: Operator, variable: list[str]) -> onnx.ModelProto:
        """Make a model of one operator and the constants that it reads."""
        needed = self._flow.upstream(op.writes, stop=frozenset(variable))
        read = {t for each in needed for t in each.reads}
        model = emptied(self._proto, op.kind)
        model.graph.node.extend(each.proto for each in needed)
        model.graph.initializer.extend(t for n, t in self._constants.items() if n in read)
        model.graph.input.extend(map(self._described, variable))
        model.graph.output.extend(map(helper.make_empty_tensor_value_info, op.writes))
        return model

    def _described(self, tensor: str) -> onnx.ValueInfoProto:
        array = self._together[tensor]
        kind = self._types.get(tensor) or helper.np_dtype_to_tensor_dtype(array.dtype)
        return helper.make_tensor_value_info(tensor, kind, [None] * array.ndim)


def _taken(whole: NDArray[Any], axis: int, i: int, size: int) -> NDArray[Any]:
    return whole.take(range(i * size, (i + 1) * size), axis)


def _exposed(proto: onnx.ModelProto, flow: Dataflow) -> onnx.ModelProto:
    """Return a copy of a model in which every inner tensor is also an output."""
    exposed = copied(proto)
    known = {output.name for output in proto.graph.output}
    for name, tensor in infer_types(proto).items():
        if name in flow.producers and name in flow.variable and name not in known:
            exposed.graph.output.append(helper.make_tensor_value_info(name, tensor.elem_type, None))
    return exposed
