"""Bringing a model into the form that slicing needs, without changing what it computes.

Operators get names, what is unused goes, onnxslim simplifies, and a fixed batch becomes symbolic.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np
import onnx
import onnxslim
from onnx import helper, numpy_helper

from offramp.compiler.errors import ModelError
from offramp.compiler.graph import Dataflow, constant_tensor, copied, refill
from offramp.compiler.runtime import GraphRunner, random_inputs, relative_difference
from offramp.compiler.shapes import BATCH, UNKNOWN, TensorType, annotate, forget_shapes, infer_types

_log = logging.getLogger(__name__)

_TOLERANCE = 1e-4
"""Relative: folding a BatchNormalization into the weights of its Conv rounds them anew; kernels
differ by batch size, in the last bits."""
MOST_SIMPLIFIED = 8000
"""Operators of a model that onnxslim is run on: it takes half a minute for so many."""
_MOST_TIED = 1000
"""Operators of a model whose equal small constants it makes one: that takes quadratic time."""
_BATCH, _ROWS = 2, 3
"""Samples that a simplified model, and one whose batch was freed, are compared on."""


def unlist_initializers(proto: onnx.ModelProto) -> None:
    """Take initializers off the graph inputs, where files before IR version 4 list them."""
    graph = proto.graph
    constants = {tensor.name for tensor in graph.initializer}
    refill(graph.input, [info for info in graph.input if info.name not in constants])


def remove_unused(proto: onnx.ModelProto) -> None:
    """Remove operators and initializers that no output depends on; sort the rest."""
    graph = proto.graph
    flow = Dataflow(graph)
    kept = flow.behind(flow.outputs, stop=frozenset())
    read = {t for op in kept for t in op.reads} | set(flow.outputs)
    refill(graph.node, [op.proto for op in kept])
    # Messages that are removed keep their memory for as long as the model lives.
    if any(tensor.name not in read for tensor in graph.initializer):
        refill(graph.initializer, [tensor for tensor in graph.initializer if tensor.name in read])


def name_operators(proto: onnx.ModelProto) -> None:
    """Give every operator a name of its own, so that segments can be united by name."""
    taken: set[str] = set()
    for node in proto.graph.node:
        if not node.name or node.name in taken:
            first = next((t for t in node.output if t), "")
            node.name = f"{node.op_type}:{first}"
        while node.name in taken:
            node.name += "'"
        taken.add(node.name)


def simplified(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Fold constants and fuse operators of a model with a symbolic batch; it is not changed.

    The raw graph of an export can hide most of its cut points. Where onnxslim fails, its result
    differs on random inputs, or it would take too long, ``proto`` itself is returned, and a warning
    logged.
    """
    operators = len(proto.graph.node)
    if operators > MOST_SIMPLIFIED:
        _log.warning(
            "not simplified: the model has %s operators, and onnxslim takes minutes beyond %s; if "
            "`eecompile inspect` finds too few cut points, run it before, as onnxslim MODEL.onnx "
            "SIMPLER.onnx --skip-optimizations weight_tying",
            f"{operators:,}",
            f"{MOST_SIMPLIFIED:,}",
        )
        return proto
    # Tying compares every pair of small constants, which takes most of the time of large graphs.
    skipped = ["weight_tying"] if operators > _MOST_TIED else []
    try:
        slim: onnx.ModelProto = onnxslim.slim(copied(proto), skip_optimizations=skipped)
        onnx.checker.check_model(slim)
        difference = _difference(proto, slim)
    except ModelError:
        raise
    except Exception as error:  # whatever a third party's optimiser raises
        _log.warning("not simplified: onnxslim fails: %s", error)
        return proto
    if not difference <= _TOLERANCE:
        _log.warning("not simplified: onnxslim changes the outputs by %.1e", difference)
        return proto
    return slim


def _difference(proto: onnx.ModelProto, slim: onnx.ModelProto) -> float:
    """Largest relative difference of any output; infinite if inputs or outputs changed."""
    feeds = random_inputs(proto, _BATCH)
    wanted = GraphRunner(proto).run(feeds)  # one after the other: each holds all weights
    after = GraphRunner(slim)
    if set(after.inputs) - set(feeds) or tuple(wanted) != after.outputs:
        return float("inf")
    actual = after.run(feeds)
    return max(relative_difference(actual[name], wanted[name]) for name in wanted)


def free_batch(proto: onnx.ModelProto) -> None:
    """Name dimension 0 of every graph input ``batch``, in place, and repair what was fixed to it.

    Exporters bake the size into the targets of ``Reshape``, and into constants that are joined to
    data, such as the class token of a vision transformer. After the repair the model is run at
    batch 1 and 3, which have to agree row by row. ModelError if an input has no batch dimension,
    or the model cannot be made to work at another batch size.
    """
    old = _old_batch(proto)
    if old is not None:
        types = infer_types(proto)
        _free_reshapes(proto, types, old)
        _free_concats(proto, types)
        forget_shapes(proto.graph)
    _rename_batch(proto.graph)
    annotate(proto)  # ONNX Runtime folds by the shapes that a model states, stale ones too
    if old is not None:
        _check_rows(proto, old)


def _old_batch(proto: onnx.ModelProto) -> int | None:
    """The fixed batch size, or None if it is symbolic already."""
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


def _rename_batch(graph: onnx.GraphProto) -> None:
    fronts = [info.type.tensor_type.shape.dim[0] for info in graph.input]
    old_names = {front.dim_param for front in fronts} - {""}
    for info in (*graph.value_info, *graph.output):
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_param in old_names:
                dim.dim_param = BATCH
    for front in fronts:
        front.dim_param = BATCH


def _check_rows(proto: onnx.ModelProto, old: int) -> None:
    remedy = (
        f"the batch size was fixed at {old} and cannot be made dynamic; export the model with a "
        "dynamic first dimension (torch.onnx.export: dynamic_axes or dynamic_shapes)"
    )
    feeds = random_inputs(proto, _ROWS)
    try:
        runner = GraphRunner(proto)
        together = runner.run(feeds)
        alone = [runner.run({k: v[i : i + 1] for k, v in feeds.items()}) for i in range(_ROWS)]
    except RuntimeError as error:
        raise ModelError(f"{remedy}. ONNX Runtime says at another size: {error}") from error
    for name, rows in together.items():
        apart = [row[name] for row in alone]
        same = all(len(row) == 1 for row in apart) and len(rows) == _ROWS
        if not same or not relative_difference(rows, np.concatenate(apart)) <= _TOLERANCE:
            raise ModelError(f"{remedy}. Output {name!r} of a sample depends on its batch")


def _free_reshapes(proto: onnx.ModelProto, types: Mapping[str, TensorType], batch: int) -> None:
    """Give every ``Reshape`` whose constant target holds the batch size one that does not."""
    graph = Dataflow(proto.graph)
    for op in graph.operators:
        if op.kind != "Reshape" or graph.is_constant(op):
            continue
        target = _constant_value(proto, graph, op.proto.input[1])
        if target is None:
            continue
        before, after = types.get(op.proto.input[0]), types.get(op.writes[0])
        freed = _freed(target.tolist(), before, after, batch)
        if freed != target.tolist():
            name = f"{op.writes[0]}/target"
            proto.graph.initializer.append(numpy_helper.from_array(np.array(freed, np.int64), name))
            op.proto.input[1] = name


def _freed(
    target: list[int], before: TensorType | None, after: TensorType | None, batch: int
) -> list[int]:
    """Return a target with the batch left open.

    ``0`` copies the dimension where the operand has the batch in front too; elsewhere ``-1``
    stands for it, and what was ``-1`` becomes the size that inference found.
    """
    first_before = before.shape[0] if before and before.shape else None
    if target and target[0] == batch and first_before == batch:
        return [0, *target[1:]]
    first_after = after.shape[0] if after and after.shape else None
    if not target or target[0] <= 0 or not isinstance(first_after, int):
        return target
    if -1 not in target:
        return [-1, *target[1:]]
    rest = after.shape[1:] if after and after.shape else ()
    sizes = [size for size in rest if isinstance(size, int)]
    return [-1, *sizes] if len(sizes) == len(rest) else target


def _constant_value(
    proto: onnx.ModelProto, graph: Dataflow, name: str
) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]] | None:
    """Value of an initializer or of a ``Constant`` node; None for anything else."""
    op = graph.producers.get(name)
    given = constant_tensor(op.proto) if op is not None else None
    given = next((t for t in proto.graph.initializer if t.name == name), given)
    return None if given is None else numpy_helper.to_array(given)


def _free_concats(proto: onnx.ModelProto, types: Mapping[str, TensorType]) -> None:
    """Repeat constants of one row over the batch where they are joined to data."""
    graph = Dataflow(proto.graph)
    added: dict[str, list[onnx.NodeProto]] = {}
    for op in graph.operators:
        axis = next((a.i for a in op.proto.attribute if a.name == "axis"), 0)
        data = next((t for t in op.proto.input if t in graph.variable), None)
        front = types.get(op.writes[0]) if op.kind == "Concat" else None
        if data is None or front is None or not front.shape or axis % len(front.shape) == 0:
            continue
        for i, tensor in enumerate(op.proto.input):
            shape = types[tensor].shape if tensor in types else None
            if tensor not in graph.variable and shape and shape[0] in {1, UNKNOWN}:
                name = f"{op.writes[0]}/row{i}"
                repeated = _repeat(proto, tensor, data, name, len(shape))
                added.setdefault(op.writes[0], []).extend(repeated)
                op.proto.input[i] = name
    nodes = [n for node in proto.graph.node for n in (*added.get(node.output[0], ()), node)]
    refill(proto.graph.node, nodes)


def _repeat(
    proto: onnx.ModelProto, tensor: str, data: str, name: str, rank: int
) -> tuple[onnx.NodeProto, ...]:
    """Nodes that expand ``tensor`` along dimension 0 to the size of ``data``.

    ``Expand`` takes a target of 1 in the other dimensions to mean the size that is there.
    """
    for suffix, values in (("first", [0]), ("ones", [1] * (rank - 1))):
        constant = numpy_helper.from_array(np.array(values, np.int64), f"{name}/{suffix}")
        proto.graph.initializer.append(constant)
    shape, size, target = (f"{name}/{part}" for part in ("shape", "size", "target"))
    return (
        helper.make_node("Shape", [data], [shape], name=shape),
        helper.make_node("Gather", [shape, f"{name}/first"], [size], name=size),
        helper.make_node("Concat", [size, f"{name}/ones"], [target], name=target, axis=0),
        helper.make_node("Expand", [tensor, target], [name], name=name),
    )
