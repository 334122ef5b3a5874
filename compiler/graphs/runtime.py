"""Running graphs at compile time in ONNX Runtime: on random inputs, with custom operators.

``--custom-ops`` names libraries of operators (:mod:`offramp.engine.backends.custom_ops`). A model
with an operator that is in neither ONNX, nor ONNX Runtime, nor a library is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import helper

from offramp.bundle.schema.compilation import OperatorLibrary
from offramp.compiler.common.errors import ModelError
from offramp.compiler.graphs.graph import Dataflow, bodies, is_standard
from offramp.compiler.graphs.index_flow import IndexRange, required_ranges
from offramp.compiler.graphs.shapes import (
    BATCH,
    declared_types,
    dtype_name,
    first_long_enough,
    symbolic_sizes,
)
from offramp.engine.backends.custom_ops import (
    LoadedLibrary,
    libraries,
    load_session,
    session_options,
    unknown_operators,
)
from offramp.engine.common.errors import BackendError

_SEQUENCE_SIZES = (16, 64, 400, 1600, 6400, 25_600)
"""Numbers that symbolic sizes are set to for random inputs of up to three dimensions: the first one
at which every window fits is used."""
_IMAGE_SIZES = (64, 64, 400, 800, 1600, 3200)
"""Numbers that symbolic sizes are set to for random inputs of four or more dimensions."""
LIMIT_S, LIMIT_PER_ROW_S = 60.0, 10.0
"""Largest number of seconds that a run may take, in total and for each row, because the file may
contain an endless loop."""


class GraphRunner:
    """A graph in an ONNX Runtime session on the CPU, to run and compare graphs at compile time."""

    def __init__(
        self, proto: onnx.ModelProto, threads: int = 1, *, profile: Path | None = None
    ) -> None:
        """Load a graph; RuntimeError if ONNX Runtime refuses it, for any reason.

        With ``profile``, the prefix of the name of a trace file, operators are timed, and the graph
        is not optimised.
        """
        options = session_options()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 4
        # An arena would keep the memory of the largest batch for as long as the session exists.
        options.enable_cpu_mem_arena = False
        if any(t.data_type == onnx.TensorProto.FLOAT16 for t in proto.graph.initializer):
            # ONNX Runtime 1.30 and 1.31 crash with all optimisations for half precision.
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        if profile is not None:
            options.enable_profiling, options.profile_file_prefix = True, str(profile)
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        # Compute Q/DQ as written: fused int8 kernels saturate on some processors only.
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        with _translated():
            self._session = load_session(proto.SerializeToString(), options)
        self.inputs = tuple(i.name for i in self._session.get_inputs())
        self.outputs = tuple(o.name for o in self._session.get_outputs())

    def end_profile(self) -> Path:
        """End the timing of operators; return the path of ONNX Runtime's trace file."""
        return Path(self._session.end_profiling())

    def run(self, feeds: Mapping[str, NDArray[np.generic]]) -> dict[str, NDArray[np.generic]]:
        """Return all outputs by name; ``feeds`` may contain more arrays than the inputs.

        RuntimeError if the run fails, ModelError if it takes longer than the limit.
        """
        inputs = {name: feeds[name] for name in self.inputs}
        rows = max((len(array) for array in inputs.values() if array.ndim), default=1)
        limit_s = LIMIT_S + LIMIT_PER_ROW_S * rows
        options, ended = ort.RunOptions(), threading.Event()

        def give_up() -> None:
            ended.set()
            options.terminate = True

        timer = threading.Timer(limit_s, give_up)
        timer.daemon = True
        timer.start()
        try:
            with _translated():
                values = self._session.run(None, inputs, options)
        except RuntimeError as error:
            if not ended.is_set():
                raise
            raise ModelError(
                f"running it on {rows} samples did not end within {limit_s:g} s; if it is not an "
                "endless loop, compile it on a faster machine"
            ) from error
        finally:
            timer.cancel()
        return dict(zip(self.outputs, values, strict=True))


@contextmanager
def _translated() -> Iterator[None]:
    """Convert ONNX Runtime's exceptions to RuntimeError with the first line of their message."""
    try:
        yield
    except BackendError as error:
        raise RuntimeError(str(error)) from error
    except Exception as error:
        if not type(error).__module__.startswith("onnxruntime"):
            raise
        raise RuntimeError(str(error).splitlines()[0]) from error


def runs_opset(opset: int) -> bool:
    """Return whether the installed ONNX Runtime runs models of an opset."""
    kind = onnx.TensorProto.FLOAT
    given, wanted = (helper.make_tensor_value_info(name, kind, [1]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "x", [given], [wanted])
    version = [helper.make_opsetid("", opset)]
    try:
        GraphRunner(helper.make_model(graph, opset_imports=version, ir_version=8))
    except RuntimeError:
        return False
    return True


def random_inputs(
    proto: onnx.ModelProto, batch: int, *, seed: int = 0, whole: bool = False
) -> dict[str, NDArray[np.generic]]:
    """Return random inputs that a model accepts, by name, for a batch size.

    Floating-point inputs are normally distributed. Integers that index a table are valid indices.
    Other integers are 0 or 1 and begin with 1, like a mask that hides no sample completely; with
    ``whole`` they are all 1, like a mask that hides nothing. Symbolic sizes are 16, or 64 for
    images, or larger if convolutions and poolings have wider windows.
    """
    rng = np.random.default_rng(seed)
    graph = Dataflow(proto.graph)
    types = declared_types(proto)
    sizes = _random_sizes(proto, batch)
    ranges = required_ranges(proto, graph)
    feeds: dict[str, NDArray[np.generic]] = {}
    for name in graph.inputs:
        shape = types[name].shape or ()
        sized = tuple(d if isinstance(d, int) else sizes[d] for d in shape)
        dtype = np.dtype(dtype_name(types[name].elem_type))
        feeds[name] = _random(rng, sized, dtype, ranges.get(name), whole=whole)
    return feeds


def _random_sizes(proto: onnx.ModelProto, batch: int) -> dict[str, int]:
    ranks = symbolic_sizes(proto)
    tried = [
        {s: image if rank > 3 else sequence for s, rank in ranks.items()} | {BATCH: batch}
        for sequence, image in zip(_SEQUENCE_SIZES, _IMAGE_SIZES, strict=True)
    ]
    return tried[first_long_enough(proto, tried)]


def describe_shapes(feeds: Mapping[str, NDArray[np.generic]]) -> str:
    """Return names and shapes for messages, such as ``audio [3, 1600]``."""
    return ", ".join(f"{name} {list(array.shape)}" for name, array in feeds.items())


def _random(
    rng: np.random.Generator,
    shape: tuple[int, ...],
    dtype: np.dtype[np.generic],
    legal: IndexRange | None,
    *,
    whole: bool,
) -> NDArray[np.generic]:
    if np.issubdtype(dtype, np.floating):
        drawn = rng.standard_normal(shape)
        return (drawn if legal is None else legal.clip(drawn)).astype(dtype)
    if legal is not None:
        return legal.draw(rng, shape).astype(dtype)
    if dtype == np.uint8:
        return rng.integers(0, 256, shape).astype(dtype)
    values = rng.integers(1 if whole else 0, 2, shape)
    if values.ndim > 1:
        values[:, 0] = 1
    return values.astype(dtype)


class _CustomOperator(NamedTuple):
    """An operator outside ONNX's own operator sets."""

    domain: str
    name: str
    version: int

    def is_known(self, given: Sequence[LoadedLibrary]) -> bool:
        """Return whether ONNX Runtime has the operator, if it has loaded these libraries."""
        node = helper.make_node(self.name, ["x"], ["y"], domain=self.domain)
        read = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, None)
        graph = helper.make_graph([node], "x", [read], [helper.make_empty_tensor_value_info("y")])
        versions = [helper.make_opsetid("", 17), helper.make_opsetid(self.domain, self.version)]
        model = helper.make_model(graph, opset_imports=versions, ir_version=8)
        try:
            load_session(model.SerializeToString(), session_options(given))
        except BackendError:
            return False
        except Exception:  # noqa: S110 - it refuses the inputs, so it knows the operator
            pass
        return True


def check_operators(proto: onnx.ModelProto) -> None:
    """Raise ModelError for a model with operators that are not available."""
    unknown = [op for op in _foreign(proto) if not op.is_known(libraries())]
    if unknown:
        raise ModelError(unknown_operators([(op.domain, op.name) for op in unknown]))


def libraries_of(proto: onnx.ModelProto) -> tuple[OperatorLibrary, ...]:
    """Return the loaded operator libraries that a model needs."""
    holders: dict[LoadedLibrary, list[str]] = {}
    for op in _foreign(proto) if libraries() else ():
        if not op.is_known(()):
            holder = next(library for library in libraries() if op.is_known([library]))
            holders.setdefault(holder, []).append(f"{op.domain}:{op.name}")
    return tuple(
        OperatorLibrary(file=Path(library.path).name, sha256=library.sha256, operators=tuple(names))
        for library, names in holders.items()
    )


def _foreign(proto: onnx.ModelProto) -> list[_CustomOperator]:
    """Return operators outside ONNX's operator sets that the model does not define, in order."""
    defined = {(function.domain, function.name) for function in proto.functions}
    versions = {opset.domain: opset.version for opset in proto.opset_import}
    nodes = [_all_nodes(proto.graph.node), *(_all_nodes(f.node) for f in proto.functions)]
    return list(
        dict.fromkeys(
            _CustomOperator(node.domain, node.op_type, versions.get(node.domain, 1))
            for part in nodes
            for node in part
            if not is_standard(node) and (node.domain, node.op_type) not in defined
        )
    )


def _all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    for node in nodes:
        yield node
        for body in bodies(node):
            yield from _all_nodes(body.node)
