"""Operators that are neither ONNX's nor ONNX Runtime's: whether somebody has given them, and who.

``--custom-ops`` names libraries of them (:mod:`offramp.engine.backends.custom_ops`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import onnx
from onnx import helper

from offramp.bundle.schema.compilation import OperatorLibrary
from offramp.compiler.common.errors import ModelError
from offramp.compiler.graphs.graph import bodies, is_standard
from offramp.engine.backends.custom_ops import (
    LoadedLibrary,
    libraries,
    load_session,
    session_options,
    unknown_operators,
)
from offramp.engine.common.errors import BackendError


class _Foreign(NamedTuple):
    """An operator outside of ONNX's own operator set."""

    domain: str
    name: str
    version: int

    def is_known(self, given: Sequence[LoadedLibrary]) -> bool:
        """Whether ONNX Runtime has it, with these libraries: whatever else it says of it."""
        node = helper.make_node(self.name, ["x"], ["y"], domain=self.domain)
        read = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, None)
        graph = helper.make_graph([node], "x", [read], [helper.make_empty_tensor_value_info("y")])
        versions = [helper.make_opsetid("", 17), helper.make_opsetid(self.domain, self.version)]
        model = helper.make_model(graph, opset_imports=versions, ir_version=8)
        try:
            load_session(model.SerializeToString(), session_options(given))
        except BackendError:
            return False
        except Exception:  # noqa: S110 - its inputs are not those that it takes, so it is known
            pass
        return True


def check_operators(proto: onnx.ModelProto) -> None:
    """Refuse a model, by a ModelError, with operators that nobody has given."""
    unknown = [op for op in _foreign(proto) if not op.is_known(libraries())]
    if unknown:
        raise ModelError(unknown_operators([(op.domain, op.name) for op in unknown]))


def libraries_of(proto: onnx.ModelProto) -> tuple[OperatorLibrary, ...]:
    """Give the libraries that a model needs, of those that this process has."""
    holders: dict[LoadedLibrary, list[str]] = {}
    for op in _foreign(proto) if libraries() else ():
        if not op.is_known(()):
            holder = next(library for library in libraries() if op.is_known([library]))
            holders.setdefault(holder, []).append(f"{op.domain}:{op.name}")
    return tuple(
        OperatorLibrary(file=Path(library.path).name, sha256=library.sha256, operators=tuple(names))
        for library, names in holders.items()
    )


def _foreign(proto: onnx.ModelProto) -> list[_Foreign]:
    """Operators outside of ONNX's own set that the model does not define itself, in order."""
    defined = {(function.domain, function.name) for function in proto.functions}
    versions = {opset.domain: opset.version for opset in proto.opset_import}
    nodes = [_all_nodes(proto.graph.node), *(_all_nodes(f.node) for f in proto.functions)]
    return list(
        dict.fromkeys(
            _Foreign(node.domain, node.op_type, versions.get(node.domain, 1))
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
