"""Sizes of a model's inputs: the batch, which is made free, and free ones that its graph fixes.

Exporters that trace a model bake the length of the example into constants, mostly into those of
Reshape. ONNX Runtime then runs the model at this length alone, although the file declares it free.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import numpy as np
import onnx
from onnx import numpy_helper

from offramp.compiler.common.errors import ModelError
from offramp.compiler.common.rounding import rounding_of
from offramp.compiler.frontend.batch_conditions import check_conditions
from offramp.compiler.frontend.batch_repair import REMEDY, repair
from offramp.compiler.graphs.graph import copied
from offramp.compiler.graphs.rows import check_rows
from offramp.compiler.graphs.runtime import GraphRunner, describe_shapes, random_inputs
from offramp.compiler.graphs.shapes import BATCH, annotate, forget_shapes
from offramp.engine.answers.differences import compare

_COMMON: Final = (8, 32, 64, 128, 224, 256, 384, 512)
"""Sizes that are tried after those that constants of the graph name."""
_TRIED: Final = 24
_LARGEST: Final = 4096
_SHORT: Final = 8
"""Elements of a constant that may be a shape."""


def free_batch(proto: onnx.ModelProto) -> None:
    """Name dimension 0 of every graph input ``batch``, in place, and repair what was fixed to it.

    After the repair rows are run at another batch size, and compared with the original. Whatever
    the batch was, nothing may be chosen for all rows by data of some (:mod:`.batch_conditions`),
    and rows alone and together have to agree (:mod:`.graphs.rows`). ModelError if an input has no
    batch
    dimension, the model cannot be made to work at another batch size, or rows change each other's
    answers.
    """
    old = fixed_size(proto)
    original = None if old is None else copied(proto)
    if old is not None:
        repair(proto, old)
        forget_shapes(proto.graph)
    rename_batch(proto.graph)
    annotate(proto)  # ONNX Runtime folds by the shapes that a model states, stale ones too
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
    """Compare rows at another batch size with what the original gives them at its own."""
    remedy = f"the batch size was fixed at {old} and cannot be made dynamic; {REMEDY}"
    rows = 3 * old
    feeds = random_inputs(freed, rows)
    before = GraphRunner(original)
    parts = [{k: v[i : i + old] for k, v in feeds.items()} for i in range(0, rows, old)]
    try:
        wanted = [before.run(part) for part in parts]
    except RuntimeError as error:
        raise ModelError(
            f"the model as it is fails on random inputs ({describe_shapes(parts[0])}), which tell "
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
                f"{remedy}. Output {name!r} of {rows} samples differs from what the model gives "
                f"{old} at a time, by {difference.describe()}"
            )


def _name_mixing(freed: onnx.ModelProto, remedy: str) -> None:
    """Name the operators that mix rows, if it is these that keep a batch from being freed."""
    try:
        check_rows(freed)
    except ModelError as error:
        raise ModelError(f"{remedy}. At another size {error}") from error


def fix_baked_sizes(proto: onnx.ModelProto) -> str:
    """Fix the free sizes of the inputs, in place, where the model runs at one size alone.

    Returns what was found, for people; empty where the free sizes are left as they are. All free
    sizes but the batch are tried with the same number.
    """
    trial = copied(proto)
    if fixed_size(trial) is None:
        rename_batch(trial.graph)
    free = _free(trial.graph)
    if not free:
        return ""
    try:
        runner = GraphRunner(trial)
    except RuntimeError:  # whoever loads it next names the reason
        return ""
    if _runs(runner, trial):
        return ""
    found: list[int] = []
    for size in _candidates(trial):
        for dim in free:
            dim.dim_value = size
        if _runs(runner, trial):
            found.append(size)
        if len(found) > 1:  # not fixed: whatever fails has another reason
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
    """Return the sizes to try: what short integer constants hold, the most frequent first."""
    constants = list(proto.graph.initializer)
    constants += [a.t for n in proto.graph.node if n.op_type == "Constant" for a in n.attribute]
    counts: Counter[int] = Counter()
    for tensor in constants:
        if tensor.data_type == onnx.TensorProto.INT64 and sum(tensor.dims) <= _SHORT:
            counts.update(numpy_helper.to_array(tensor).ravel().tolist())
    named = [size for size, _ in counts.most_common() if 1 < size <= _LARGEST]
    return list(dict.fromkeys([*named[: _TRIED - len(_COMMON)], *_COMMON]))
