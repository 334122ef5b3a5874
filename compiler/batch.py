"""Freeing the batch dimension of a model, and trying whether it then computes the same."""

from __future__ import annotations

import numpy as np
import onnx

from offramp.compiler.batch_conditions import check_conditions
from offramp.compiler.batch_repair import REMEDY, repair
from offramp.compiler.errors import ModelError
from offramp.compiler.graph import copied
from offramp.compiler.rounding import rounding_of
from offramp.compiler.rows import check_rows
from offramp.compiler.runtime import GraphRunner, describe_shapes, random_inputs
from offramp.compiler.shapes import BATCH, annotate, forget_shapes
from offramp.engine.differences import compare


def free_batch(proto: onnx.ModelProto) -> None:
    """Name dimension 0 of every graph input ``batch``, in place, and repair what was fixed to it.

    After the repair rows are run at another batch size, and compared with the original. Whatever
    the batch was, nothing may be chosen for all rows by data of some (:mod:`.batch_conditions`),
    and rows alone and together have to agree (:mod:`.rows`). ModelError if an input has no batch
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
