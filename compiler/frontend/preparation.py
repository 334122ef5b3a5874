"""Edits that convert a model to the form that slicing needs, without changing its results.

Old opsets are converted, operators get names, unused parts are removed, and onnxslim simplifies.
The order of the edits is in :mod:`.passes`.
"""

from __future__ import annotations

import logging

import numpy as np
import onnx
from onnx import helper, numpy_helper, version_converter

from offramp.bundle.schema.inputs import TensorSpec
from offramp.compiler.common.errors import ModelError
from offramp.compiler.common.rounding import rounding_of
from offramp.compiler.frontend.simplifier import LIMIT_S, SimplifierError, slim
from offramp.compiler.graphs.graph import (
    Dataflow,
    default_opset,
    read_names,
    refill,
    rename_tensor,
    weight_bytes,
)
from offramp.compiler.graphs.runtime import GraphRunner, random_inputs, runs_opset
from offramp.compiler.graphs.shapes import FLOATING, declared_types, dtype_name
from offramp.compiler.graphs.weights import WeightFile, without_named
from offramp.engine.answers.differences import relative_difference

_log = logging.getLogger(__name__)

MIN_OPSET = 13
"""Opset that older models are converted to. In it, ``axes`` are inputs, and Softmax computes along
one axis."""
_MOST_OPSET = 99
"""Opset at which the downward search for the newest runnable opset begins."""
MIN_IR_VERSION = 8
"""Oldest IR version of the file format; since version 4 initializers need not be graph inputs."""
MOST_SIMPLIFIED = 8000
"""Largest number of operators in a model that onnxslim is run on; it takes half a minute for so
many."""
_MOST_TIED = 1000
"""Largest number of operators in a model in which equal small constants are merged: merging takes
quadratic time."""
_SMALL_BYTES = 2**24
"""Largest size in bytes of weights with which onnxslim runs on a copy in memory; for larger weights
it runs in a separate process."""
_SHOWN = 120
"""Largest number of characters of the simplifier's error that are shown."""
_BATCH = 2
"""Number of samples on which a simplified model is compared with the original."""


def modern(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Convert a model to :data:`MIN_OPSET` if it is older."""
    opset = default_opset(proto)
    if opset < MIN_OPSET:
        try:
            proto = _converted(proto)
        except Exception as error:  # the converter raises RuntimeError and its own kinds
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ModelError(
                f"opset {opset}, expected {MIN_OPSET} or newer, and conversion fails ({reason}); "
                f"export the model again with opset_version={MIN_OPSET} or newer"
            ) from error
        _log.info("converted from opset %d to %d", opset, MIN_OPSET)
    elif opset > MIN_OPSET and not runs_opset(opset):
        newest = next(n for n in range(min(opset, _MOST_OPSET), 0, -1) if runs_opset(n))
        raise ModelError(
            f"opset {opset} is newer than the ONNX Runtime that is installed here takes (up to "
            f"{newest}); export the model with opset_version={newest}, or install a newer "
            "onnxruntime"
        )
    proto.ir_version = max(proto.ir_version, MIN_IR_VERSION)
    return proto


def _converted(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Convert to :data:`MIN_OPSET`.

    During the conversion, weights that are in a file are inputs.
    """
    named = [tensor for tensor in proto.graph.initializer if tensor.external_data]
    # before the file's IR version is raised: the converter finds weights by it
    made = version_converter.convert_version(without_named(proto), MIN_OPSET)
    made.graph.initializer.extend(named)
    unlist_initializers(made)
    return made


def specs(proto: onnx.ModelProto, names: list[str]) -> tuple[TensorSpec, ...]:
    """Describe inputs or outputs; ModelError if one has a type or size that is not supported."""
    types = declared_types(proto)
    try:
        return tuple(
            TensorSpec(name=n, dtype=types[n].dtype, shape=types[n].shape or ()) for n in names
        )
    except ValueError as error:
        raise ModelError(f"{', '.join(names)}: {error}") from error


def unlist_initializers(proto: onnx.ModelProto) -> None:
    """Remove initializers from the graph inputs, where files before IR version 4 list them."""
    graph = proto.graph
    constants = {tensor.name for tensor in graph.initializer}
    refill(graph.input, [info for info in graph.input if info.name not in constants])


def give_column(proto: onnx.ModelProto) -> bool:
    """Add a second dimension to an output [batch], in place, so that it is [batch, 1].

    The output keeps its name. Returns whether the output was changed.
    """
    (output,) = proto.graph.output
    tensor = output.type.tensor_type
    if len(tensor.shape.dim) != 1 or dtype_name(tensor.elem_type) not in FLOATING:
        return False
    name, inner, axes = output.name, f"{output.name}/flat", f"{output.name}/flat_axes"
    rename_tensor(proto.graph, name, inner)
    proto.graph.initializer.append(numpy_helper.from_array(np.array([1]), axes))
    proto.graph.node.append(
        helper.make_node("Unsqueeze", [inner, axes], [name], name=f"{name}/column")
    )
    tensor.shape.dim.add(dim_value=1)
    return True


def remove_unused(proto: onnx.ModelProto) -> None:
    """Remove operators and initializers that no output depends on; sort the remaining ones."""
    graph = proto.graph
    refill(graph.node, [op.proto for op in Dataflow(graph).needed])
    read = read_names(graph)
    # Removed messages keep their memory for as long as the model exists.
    if any(tensor.name not in read for tensor in graph.initializer):
        refill(graph.initializer, [tensor for tensor in graph.initializer if tensor.name in read])


def name_operators(proto: onnx.ModelProto) -> None:
    """Give every operator a unique name, so that segments can be joined by name."""
    taken: set[str] = set()
    for node in proto.graph.node:
        if not node.name or node.name in taken:
            first = next((t for t in node.output if t), "")
            node.name = f"{node.op_type}:{first}"
        while node.name in taken:
            node.name += "'"
        taken.add(node.name)


def simplified(
    proto: onnx.ModelProto, *, limit_s: float = LIMIT_S, weights: WeightFile | None = None
) -> onnx.ModelProto:
    """Fold constants and fuse operators of a model with a symbolic batch; it is not changed.

    The unsimplified graph of an export may show few of its cut points. ``proto`` itself is
    returned, and a warning is logged, if onnxslim fails, takes longer than ``limit_s`` seconds, or
    changes the result on random inputs. ``weights`` is the file of the model's weights, if they are
    not inside it.
    """
    operators = len(proto.graph.node)
    if operators > MOST_SIMPLIFIED:
        _log.warning(
            "not simplified: the model has %s operators, and onnxslim takes minutes beyond %s; if "
            "`eecompile inspect` finds too few cut points, run it first: onnxslim MODEL.onnx "
            "SIMPLER.onnx --skip-optimizations weight_tying",
            f"{operators:,}",
            f"{MOST_SIMPLIFIED:,}",
        )
        return proto
    # Tying compares every pair of small constants, which takes most of the time of large graphs.
    skipped = ["weight_tying"] if operators > _MOST_TIED else []
    try:
        named = weights is not None and weight_bytes(proto) > _SMALL_BYTES
        given = proto if weights is None or named else weights.whole(proto)
        folder = weights.folder if weights is not None and named else None
        simpler = slim(given, skipped, folder=folder, limit_s=limit_s)
        difference = _difference(given, simpler)
        simpler = simpler if weights is None else weights.light(simpler)
    except ModelError:
        raise
    except SimplifierError as error:
        _log.warning("not simplified: %s", _one_line(error))
        return proto
    except Exception as error:  # any error that a model made by onnxslim causes
        _log.warning("not simplified: onnxslim fails: %s", _one_line(error))
        return proto
    if not difference <= rounding_of(proto).batches:
        _log.warning("not simplified: onnxslim changes the outputs by %.1e", difference)
        return proto
    return simpler


def _one_line(error: Exception) -> str:
    """Return the beginning of an error in one line: errors of ONNX Runtime have several lines."""
    return f"{' '.join(str(error).split()):.{_SHOWN}}"


def _difference(proto: onnx.ModelProto, simpler: onnx.ModelProto) -> float:
    """Return the largest relative difference of outputs; infinite if inputs or outputs differ."""
    feeds = random_inputs(proto, _BATCH)
    wanted = GraphRunner(proto).run(feeds)  # run one after the other, as each holds all weights
    after = GraphRunner(simpler)
    if set(after.inputs) - set(feeds) or tuple(wanted) != after.outputs:
        return float("inf")
    actual = after.run(feeds)
    return max(relative_difference(actual[name], wanted[name]) for name in wanted)
