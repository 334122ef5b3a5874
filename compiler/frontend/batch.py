"""Sizes of a model's inputs: the batch is made symbolic; sizes that the graph fixes are found.

Exporters that trace a model may write the length of the example input into constants, mostly those
of Reshape. ONNX Runtime then runs the model only at this length, although the file declares the
length as free.

A model is refused if it makes one choice for a whole batch by the data of its samples; the error
names the operator. An ``If`` takes one branch for all rows. If its condition depends on data, as in
a BranchyNet that was exported with its own exit, a sample's answer depends on the other samples of
its batch. A test with a few rows may not show a choice that is rare. So the graph is followed, to
find for each row of each tensor whether it depends only on data of the same row, or on data of
other rows. Sums over several rows always show in a test: :mod:`.graphs.row_mixing` finds them by
running the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, TypeAlias

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, inliner

from offramp.compiler.common.errors import ModelError
from offramp.compiler.common.rounding import rounding_of
from offramp.compiler.common.tensors import array_of
from offramp.compiler.frontend.batch_repair import REMEDY, repair
from offramp.compiler.graphs.graph import (
    Dataflow,
    Operator,
    bodies,
    constant_tensor,
    copied,
    integer,
)
from offramp.compiler.graphs.row_mixing import check_rows
from offramp.compiler.graphs.runtime import GraphRunner, describe_shapes, random_inputs
from offramp.compiler.graphs.shapes import (
    BATCH,
    UNKNOWN,
    TensorType,
    annotate,
    declared_types,
    forget_shapes,
    infer_types,
    shape_of,
)
from offramp.engine.answers.differences import compare

_COMMON: Final = (8, 32, 64, 128, 224, 256, 384, 512)
"""Sizes to try after those that are found in the graph's constants."""
_TRIED: Final = 24
_LARGEST: Final = 4096
_SHORT: Final = 8
"""Largest number of elements of a constant that may be a shape."""


def free_batch(proto: onnx.ModelProto) -> None:
    """Name dimension 0 of all graph inputs ``batch``, in place; repair operators that fix its size.

    After a repair, rows are run at another batch size and compared with the original model. In
    every case, data of some rows must not decide for all rows (:func:`check_conditions`), and rows
    must get equal answers alone and together (:mod:`.graphs.row_mixing`). ModelError if an input
    has no batch dimension, if the model cannot be made to work at another batch size, or if rows
    change each other's answers.
    """
    old = fixed_size(proto)
    original = None if old is None else copied(proto)
    if old is not None:
        repair(proto, old)
        forget_shapes(proto.graph)
    rename_batch(proto.graph)
    annotate(proto)  # ONNX Runtime folds constants by the stated shapes, even outdated ones
    if original is not None and old is not None:
        _check_freed(original, proto, old)
    check_conditions(proto)
    check_rows(proto)


def fixed_size(proto: onnx.ModelProto) -> int | None:
    """Return the batch size that a model fixes; ``None`` if it is symbolic.

    ModelError if an input has no batch dimension.
    """
    sizes: dict[str, int] = {}
    for info in proto.graph.input:
        dims = info.type.tensor_type.shape.dim
        if not dims:
            raise ModelError(
                f"input {info.name!r} has no dimensions: the first dimension of every input has "
                "to be the batch; make the input a constant of the model, or export it with one "
                "value per sample"
            )
        if dims[0].HasField("dim_value"):
            sizes[info.name] = dims[0].dim_value
    if len(set(sizes.values())) > 1:
        raise ModelError(
            f"the inputs disagree about the batch size: {sizes}; the first dimension of every "
            "input has to be the batch; export the model with that dimension dynamic"
        )
    return next(iter(sizes.values()), None)


def rename_batch(graph: onnx.GraphProto) -> None:
    """Name dimension 0 of every graph input ``batch``, in place."""
    fronts = [info.type.tensor_type.shape.dim[0] for info in graph.input]
    old_names = {front.dim_param for front in fronts} - {""}
    for info in (*graph.value_info, *graph.output):
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_param in old_names:
                dim.dim_param = BATCH
    for front in fronts:
        front.dim_param = BATCH


def _check_freed(original: onnx.ModelProto, freed: onnx.ModelProto, old: int) -> None:
    """Compare answers at another batch size with the original model's at its fixed size."""
    remedy = f"the batch size was fixed at {old} and cannot be made dynamic; {REMEDY}"
    rows = 3 * old
    feeds = random_inputs(freed, rows)
    before = GraphRunner(original)
    parts = [{k: v[i : i + old] for k, v in feeds.items()} for i in range(0, rows, old)]
    try:
        wanted = [before.run(part) for part in parts]
    except RuntimeError as error:
        raise ModelError(
            f"the original model fails on random inputs ({describe_shapes(parts[0])}), which test "
            f"whether its batch of {old} can be made dynamic; export it with a dynamic first "
            f"dimension, or with all other sizes fixed. ONNX Runtime says: {error}"
        ) from error
    try:
        found = GraphRunner(freed).run(feeds)
    except RuntimeError as error:
        raise ModelError(f"{remedy}. ONNX Runtime says: {error}") from error
    for name, values in found.items():
        apart = [each[name] for each in wanted]
        if not all(array.ndim and len(array) == old for array in apart):
            raise ModelError(
                f"{remedy}. Output {name!r} is {list(apart[0].shape)} for {old} samples: its first "
                "dimension has to be the batch"
            )
        difference = compare(values, np.concatenate(apart))
        if not difference.share <= rounding_of(freed).batches:
            _name_mixing(freed, remedy)
            raise ModelError(
                f"{remedy}. Output {name!r} of {rows} samples in one batch differs from the output "
                f"in batches of {old}, by {difference.describe()}"
            )


def _name_mixing(freed: onnx.ModelProto, remedy: str) -> None:
    """Raise ModelError with the operators that mix rows, if these keep the batch size fixed."""
    try:
        check_rows(freed)
    except ModelError as error:
        raise ModelError(f"{remedy}. At another size {error}") from error


def fix_baked_sizes(proto: onnx.ModelProto) -> str:
    """Fix the free sizes of the inputs, in place, if the model runs only with certain sizes.

    Returns a description for users; empty if the free sizes stay as they are. In a trial, all free
    sizes except the batch have the same number.
    """
    trial = copied(proto)
    if fixed_size(trial) is None:
        rename_batch(trial.graph)
    free = _free(trial.graph)
    if not free:
        return ""
    try:
        runner = GraphRunner(trial)
    except RuntimeError:  # the next load names the reason
        return ""
    if _runs(runner, trial):
        return ""
    found: list[int] = []
    for size in _candidates(trial):
        for dim in free:
            dim.dim_value = size
        if _runs(runner, trial):
            found.append(size)
        if len(found) > 1:  # several sizes run: the failure has another reason
            return ""
    if not found:
        return ""
    names = dict.fromkeys(dim.dim_param for dim in _free(proto.graph))
    _fix(proto.graph, set(names), found[0])
    sizes = ", ".join(f"{name or 'a size without a name'} = {found[0]}" for name in names)
    return (
        f"the model runs at {sizes} only, although the file declares it free: other sizes are "
        "refused. Export it with another exporter (torch.onnx.export(..., dynamo=True)) to free it"
    )


def _free(graph: onnx.GraphProto) -> list[onnx.TensorShapeProto.Dimension]:
    return [
        dim
        for info in graph.input
        for dim in info.type.tensor_type.shape.dim[1:]
        if not dim.HasField("dim_value") and dim.dim_param != BATCH
    ]


def _fix(graph: onnx.GraphProto, names: set[str], size: int) -> None:
    for dim in _free(graph):
        dim.dim_value = size
    for info in (*graph.value_info, *graph.output):
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_param and dim.dim_param in names:
                dim.dim_value = size


def _runs(runner: GraphRunner, proto: onnx.ModelProto) -> bool:
    try:
        runner.run(random_inputs(proto, 1))
    except RuntimeError:
        return False
    return True


def _candidates(proto: onnx.ModelProto) -> list[int]:
    """Return the sizes to try: values of short integer constants, the most frequent first."""
    constants = list(proto.graph.initializer)
    constants += [a.t for n in proto.graph.node if n.op_type == "Constant" for a in n.attribute]
    counts: Counter[int] = Counter()
    for tensor in constants:
        if tensor.data_type == onnx.TensorProto.INT64 and sum(tensor.dims) <= _SHORT:
            counts.update(array_of(tensor).ravel().tolist())
    named = [size for size, _ in counts.most_common() if 1 < size <= _LARGEST]
    return list(dict.fromkeys([*named[: _TRIED - len(_COMMON)], *_COMMON]))


Shape: TypeAlias = "tuple[int | str, ...]"


class Level(IntEnum):
    """Kind of data that the values, or the sizes, of a tensor depend on."""

    FIXED = 0
    """Only constants, and sizes of inputs."""
    ROWS = 1
    """For each row, data of that row only, as far as the graph shows."""
    COUNTED = 2
    """The number of elements that were selected from several rows, as by ``NonZero``."""
    MIXED = 3
    """Data of several rows, or data of one row that affects all rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependence:
    """Data of a graph's inputs that the values and the sizes of a tensor depend on."""

    values: Level = Level.FIXED
    sizes: Level = Level.FIXED
    mixed_by: str = ""
    """Label of the operator that combines several rows; empty if there is none."""


FIXED: Final = Dependence()
_DISCRETE: Final = frozenset({
    "And", "ArgMax", "ArgMin", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "Ceil",
    "Equal", "Floor", "Greater", "GreaterOrEqual", "Hardmax", "IsInf", "IsNaN", "Less",
    "LessOrEqual", "NonZero", "Not", "Or", "Round", "Sign", "Unique", "Xor",
})  # fmt: skip
"""Operators with a discontinuous result. In a trial run all rows may give the same result, although
other rows would not."""
_GATES: Final = frozenset({
    "Celu", "Clip", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Max",
    "Min", "Mish", "Pow", "Relu", "Selu", "Sigmoid", "Softplus", "Softsign", "Swish", "Tanh",
    "ThresholdedRelu",
})  # fmt: skip
"""Operators whose result may be constant for most values and change for only a few."""
_STEERED: Final[Mapping[str, tuple[int, ...]]] = {
    "Compress": (1,), "ConstantOfShape": (0,), "Expand": (1,), "Gather": (1,),
    "GatherElements": (1,), "GatherND": (1,), "OneHot": (0, 1), "Pad": (1,), "Range": (0, 1, 2),
    "Reshape": (1,), "Resize": (2, 3), "ScatterElements": (1,), "ScatterND": (1,),
    "Slice": (1, 2, 3, 4), "Split": (1,), "Tile": (1,), "TopK": (1,), "Trilu": (1,), "Where": (0,),
}  # fmt: skip
"""Inputs (by index) that make an operator choose positions or sizes, by operator type."""
_SIZED_BY: Final = frozenset({"ConstantOfShape", "Expand", "Range", "Reshape", "Resize", "Tile"})
"""Operators whose input in :data:`_STEERED` decides the size of the result, not its values."""
_CHOOSING: Final = frozenset({"If", "Loop", "Where"})
_COUNTING: Final = frozenset({"Compress", "NonMaxSuppression", "NonZero", "Unique"})
_SHAPING: Final = frozenset({"Cast", "Concat", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
"""Operators that may lie between a count of elements and its use as a size."""
_ALONG: Final = frozenset({
    "ArgMax", "ArgMin", "CumSum", "Hardmax", "LogSoftmax", "LpNormalization", "Softmax", "TopK",
})  # fmt: skip
"""Operators that compute along an axis, and whose result keeps that axis."""
_RECURRENT: Final = frozenset({"GRU", "LSTM", "RNN"})
_INTEGER_TYPES: Final = frozenset({
    TensorProto.BOOL, TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64,
    TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64,
})  # fmt: skip
_REMEDY: Final = (
    "let each sample choose for itself (torch.where, with a condition for each row), or export the "
    "model without that choice: exits are what eecompile adds"
)


def check_conditions(proto: onnx.ModelProto) -> None:
    """Check the data that conditions, positions and sizes depend on; the batch is symbolic.

    Raises:
        ModelError: The model chooses for a whole batch by data of its samples.
    """
    types = declared_types(proto)
    if proto.functions:
        proto = inliner.inline_local_functions(proto)
        types = infer_types(proto)
    weights = {tensor.name: tensor for tensor in proto.graph.initializer}
    inputs = {info.name: Dependence(values=Level.ROWS) for info in proto.graph.input}
    known = inputs | dict.fromkeys(weights, FIXED)
    _Followed(proto.graph, known, weights, types).run()


class _Followed:
    """Dependences of the tensors in a graph or in an operator's body, found from its inputs on."""

    def __init__(
        self,
        graph: onnx.GraphProto,
        known: Mapping[str, Dependence],
        weights: Mapping[str, onnx.TensorProto],
        types: Mapping[str, TensorType],
    ) -> None:
        self._flow = Dataflow(graph)
        self._known = dict(known)
        self._weights = weights
        self._types = types

    def run(self) -> list[Dependence]:
        """Follow the batch through the graph; return how each output depends on the inputs."""
        for op in self._flow.operators:
            read = [self._known.get(name, FIXED) for name in op.reads]
            self._check(op)
            joined = _joined(read)
            for body in bodies(op.proto):
                joined = _joined([joined, *self._through(op, body)])
            for name in op.writes:
                self._known[name] = self._given(op, name, joined)
        return [self._known.get(name, FIXED) for name in self._flow.outputs]

    def _check(self, op: Operator) -> None:
        """Raise ModelError if an operator chooses for all rows by data of some rows."""
        conditions = {"If": (0,), "Loop": (0, 1)}.get(op.kind, ())
        for tensor, found in self._inputs(op, conditions):
            if found.values >= Level.ROWS:
                raise self._refusal(op, tensor, found)
        jumps = op.kind in _DISCRETE or self._rounds_to_integer(op)
        places = list(range(len(op.proto.input))) if jumps else [*_STEERED.get(op.kind, ())]
        if op.kind in _GATES:
            places = [i for i, name in enumerate(op.proto.input) if self._is_one_for_all(name)]
        for tensor, found in self._inputs(op, places):
            counts = op.kind == "Where" and found.values is Level.COUNTED and not self._whole(op)
            if found.values is Level.MIXED or counts:
                raise self._refusal(op, tensor, found)

    def _inputs(self, op: Operator, places: Sequence[int]) -> Iterator[tuple[str, Dependence]]:
        for place in places:
            if place < len(op.proto.input) and (tensor := op.proto.input[place]):
                yield tensor, self._known.get(tensor, FIXED)

    def _is_one_for_all(self, tensor: str) -> bool:
        """Return whether a tensor lacks a separate value for each row."""
        shape = shape_of(self._types, tensor)
        return shape is not None and UNKNOWN not in shape and not _batch_axes(shape)

    def _rounds_to_integer(self, op: Operator) -> bool:
        targets = [a.i for a in op.proto.attribute if a.name == "to"]
        source = self._types.get(op.proto.input[0]) if op.kind == "Cast" else None
        was_integer = source is not None and source.elem_type in _INTEGER_TYPES
        return bool(targets) and targets[0] in _INTEGER_TYPES and not was_integer

    def _whole(self, op: Operator) -> bool:
        found = self._types.get(op.writes[0])
        return found is not None and found.elem_type in _INTEGER_TYPES

    def _through(self, op: Operator, body: onnx.GraphProto) -> list[Dependence]:
        """Follow a body (inner graph) until the dependences of its loop variables stay equal."""
        weights = {**self._weights, **{tensor.name: tensor for tensor in body.initializer}}
        first, states = _states(op, body)
        reads = [self._known.get(name, FIXED) for name in op.proto.input]
        begins = [FIXED, FIXED, *reads[2:]] if op.kind == "Loop" else reads
        given = begins[: len(body.input)]
        while True:
            named = {info.name: each for info, each in zip(body.input, given, strict=False)}
            outputs = _Followed(body, self._known | named, weights, {}).run()
            if op.kind == "Loop" and outputs[0].values >= Level.ROWS:
                raise self._refusal(op, body.output[0].name, outputs[0])
            again = list(given)
            for i in range(states):
                ends = outputs[i + (op.kind == "Loop")]
                again[first + i] = _joined([given[first + i], ends])
            if again == given:
                return outputs
            given = again

    def _given(self, op: Operator, tensor: str, read: Dependence) -> Dependence:
        """Return the dependence of an operator's output; ``read`` is that of its inputs."""
        if op.kind in ("Shape", "Size"):
            return Dependence(values=read.sizes, mixed_by=read.mixed_by if read.sizes else "")
        if op.kind == "DynamicQuantizeLinear" and tensor != op.writes[0]:
            return FIXED  # rounding by the range of other rows is measured and counted elsewhere
        values, sizes = read.values, read.sizes
        if op.kind in _SIZED_BY:
            steering = {op.proto.input[i] for i in _STEERED[op.kind] if i < len(op.proto.input)}
            others = [self._known.get(n, FIXED) for n in op.reads if n not in steering]
            values = _joined(others).values
            sizes = max(sizes, read.values if read.values > values else Level.FIXED)
            if op.kind == "Range":
                values = read.values
        if op.kind in _COUNTING:
            sizes = max(sizes, Level.COUNTED)
        if values is Level.ROWS and self._mixes(op, tensor):
            level = Level.COUNTED if self._counts(op) else Level.MIXED
            return Dependence(values=level, sizes=sizes, mixed_by=op.label)
        return Dependence(values=values, sizes=sizes, mixed_by=read.mixed_by)

    def _counts(self, op: Operator) -> bool:
        """Return whether an operator counts selected elements, as the size of their new values.

        torch's exporter makes such operators of ``y[y < 0] = 0``.
        """
        cast = self._flow.producers.get(op.proto.input[0])
        if op.kind != "ReduceSum" or cast is None or cast.kind != "Cast":
            return False
        source = self._types.get(cast.proto.input[0])
        chosen = source is not None and source.elem_type == TensorProto.BOOL
        return chosen and self._is_size(op.writes[0])

    def _is_size(self, tensor: str) -> bool:
        """Return whether a tensor is only used as the size to which another value is repeated."""
        users = self._flow.consumers.get(tensor, ())
        for op in users:
            places = [place for place, name in enumerate(op.proto.input) if name == tensor]
            sizes = op.kind in ("ConstantOfShape", "Expand") and places == [*_STEERED[op.kind]]
            shaped = op.kind in _SHAPING and (op.kind == "Concat" or places == [0])
            if not sizes and not (shaped and self._is_size(op.writes[0])):
                return False
        return bool(users) and tensor not in self._flow.outputs

    def _mixes(self, op: Operator, tensor: str) -> bool:
        """Return whether the output mixes values of several rows, or has one value for all rows."""
        shape = shape_of(self._types, tensor)
        if shape is not None and UNKNOWN not in shape and _batch_axes(shape) != 1:
            return True
        if op.kind.startswith("Reduce") and self._reduces_all(op):
            return True
        source = shape_of(self._types, op.proto.input[0]) if op.proto.input else None
        places = [i for i, size in enumerate(source or ()) if _holds_batch(size)]
        if source is None or len(places) != 1:
            return False
        return self._mixes_along(op, places[0], source, shape)

    def _mixes_along(self, op: Operator, batch: int, source: Shape, shape: Shape | None) -> bool:
        """Return whether an operator computes along axis ``batch`` of its first input."""
        told = {a.name: a.i for a in op.proto.attribute if a.type == onnx.AttributeProto.INT}
        if op.kind in _ALONG:
            return self._axis(op, told) % len(source) == batch
        if op.kind in _RECURRENT:
            return batch != (0 if told.get("layout") else 1)
        if op.kind == "BatchNormalization":
            return bool(told.get("training_mode"))
        return op.kind == "Slice" and self._takes_some(op, batch, source, shape)

    def _reduces_all(self, op: Operator) -> bool:
        """Return whether a reduction has no axes, which means that it reduces all of them."""
        told = {a.name for a in op.proto.attribute}
        return not {"axes", "noop_with_empty_axes"} & told and not any(op.proto.input[1:])

    def _axis(self, op: Operator, told: Mapping[str, int]) -> int:
        if op.kind == "CumSum":
            value = self._constant(op.proto.input[1])
            return -1 if value is None else int(value.reshape(-1)[0])
        return told.get("axis", 0 if op.kind in ("ArgMax", "ArgMin") else -1)

    def _takes_some(self, op: Operator, axis: int, source: Shape, shape: Shape | None) -> bool:
        """Return whether a slice drops rows or reverses their order."""
        if shape is not None and shape[axis] != source[axis]:
            return True
        axes, steps = (
            self._constant(op.proto.input[i]) if len(op.proto.input) > i else None for i in (3, 4)
        )
        if steps is None:
            return False
        along = range(len(steps)) if axes is None else (axes % len(source)).tolist()
        return any(i == axis and step < 0 for i, step in zip(along, steps.tolist(), strict=False))

    def _refusal(self, op: Operator, tensor: str, found: Dependence) -> ModelError:
        entered = (
            f", which {found.mixed_by} computes from several samples" if found.mixed_by else ""
        )
        user = self._user(op)
        leads = f", and {user.label} depends on it" if user is not None else ""
        return ModelError(
            f"{op.label} chooses for a whole batch by the data of its samples, at "
            f"{tensor!r}{entered}{leads}: a sample's answer might depend on other samples; "
            f"{_REMEDY}"
        )

    def _user(self, op: Operator) -> Operator | None:
        """Find the first operator downstream of ``op`` that chooses between branches or values."""
        reached = set(op.writes)
        for later in self._flow.operators[op.index + 1 :]:
            if not reached.isdisjoint(later.reads):
                if later.kind in _CHOOSING:
                    return later
                reached.update(later.writes)
        return None

    def _constant(self, tensor: str) -> NDArray[Any] | None:
        op = self._flow.producers.get(tensor)
        found = self._weights.get(tensor) if op is None else constant_tensor(op.proto)
        return None if found is None else array_of(found)


def _states(op: Operator, body: onnx.GraphProto) -> tuple[int, int]:
    """Return the index of a body's first input that is a loop variable, and their number."""
    if op.kind == "Loop":
        return 2, len(body.input) - 2
    return 0, len(body.input) - integer(op.proto, "num_scan_inputs")


def _joined(found: Sequence[Dependence]) -> Dependence:
    """Return the dependence of a tensor that is computed from several tensors."""
    if not found:
        return FIXED
    most = max(found, key=lambda each: (max(each.values, each.sizes), each.values))
    return Dependence(
        values=max(each.values for each in found),
        sizes=max(each.sizes for each in found),
        mixed_by=most.mixed_by,
    )


def _batch_axes(shape: Sequence[int | str]) -> int:
    return sum(map(_holds_batch, shape))


def _holds_batch(size: int | str) -> bool:
    return isinstance(size, str) and BATCH in size.split("*")
