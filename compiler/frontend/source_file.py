"""Reading the user's ONNX file and its external data, each file only after it was checked.

A model file names the files that hold its weights. A model file from an untrusted source could name
any file that the user may read. So names outside the model's folder, and links, are refused before
they are opened.

Some files run in ONNX Runtime although the ONNX checker refuses them; exporters and tools that cut
graphs write such files. These files are rewritten in the standard form, because their meaning is
clear.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import onnx
from google.protobuf.message import DecodeError
from onnx import defs, helper
from onnx.external_data_helper import load_external_data_for_tensor, uses_external_data

from offramp.bundle.graph_weights import MOST_BYTES
from offramp.bundle.npz import open_regular
from offramp.compiler.common.errors import ModelError
from offramp.compiler.graphs.graph import (
    all_graphs,
    bodies,
    captured_names,
    copied,
    refill,
    sort_operators,
)
from offramp.compiler.graphs.runtime import GraphRunner, random_inputs
from offramp.compiler.graphs.shapes import UNKNOWN, TensorType, infer_types
from offramp.compiler.graphs.weights import WeightFile, check_standard

_REMEDY = "export it to ONNX first: torch.onnx.export, or in Python offramp.compile(module, data)"


def load_source(path: Path, weights: WeightFile | None = None) -> tuple[onnx.ModelProto, str]:
    """Read and check a model file with its external data; return the model and a hash of both.

    Large weights are moved into ``weights`` one by one, and the model refers to them by name.
    Without ``weights`` the model contains all weights, at most 2 GiB.

    Raises:
        ModelError: The file is missing, not an ONNX model, names forbidden files, or is too large.
        ScratchError: The disk has no space for the weights.
    """
    data = _read(path)
    digest, size = hashlib.sha256(data), len(data)
    try:
        proto = onnx.load_model_from_string(data)
    except DecodeError as error:
        raise ModelError(f"{path}: not an ONNX file; {_REMEDY}") from error
    del data  # the checker makes two copies itself
    if not proto.graph.node:
        raise ModelError(f"{path}: not an ONNX file, or one without operators; {_REMEDY}")
    files = _external_files(proto, path)
    if weights is None:
        _check_size(path, size + sum(file.stat().st_size for file in files))
    else:
        weights.check_space(proto)
    for file in files:
        with open_regular(file) as opened:
            for chunk in iter(partial(opened.read, 2**20), b""):
                digest.update(chunk)
    try:
        held = _load_external(proto, path.parent, weights)
        _check_size(path, size + held)
        if weights is not None:
            proto = weights.light(proto)
        sort_operators(proto.graph)  # ONNX Runtime runs files in any order
        to_standard_form(proto)
        check_standard(proto)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    except (onnx.checker.ValidationError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"{path}: breaks a rule of ONNX, so that runtimes would refuse or misread it; export "
            f"the model again, with a newer exporter if there is one. The rule: {reason}"
        ) from error
    return proto, digest.hexdigest()


def _read(path: Path) -> bytes:
    if Path(path, "manifest.json").is_file():
        raise ModelError(
            f"{path}: is a bundle already; serve it with eeserve {path}, or look at it with "
            f"eecompile inspect {path}"
        )
    try:
        with open_regular(path) as file:
            _check_size(path, os.fstat(file.fileno()).st_size)
            return file.read()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error


def _check_size(path: Path, size: int) -> None:
    if size > MOST_BYTES:
        raise ModelError(
            f"{path}: {size / 2**30:.1f} GiB in one message, which may have "
            f"{MOST_BYTES / 2**30:.0f} GiB at most; store the weights as external data, as "
            "initializers of the graph: "
            "onnx.save(model, path, save_as_external_data=True)"
        )


def _external_files(proto: onnx.ModelProto, path: Path) -> list[Path]:
    """Return the weight files next to the model, after checking all of them."""
    sizes: dict[str, int] = {}
    for tensor in chain(proto.graph.initializer, _inner_tensors(proto)):
        if uses_external_data(tensor):
            location, end = _claim(tensor, path)
            if location not in sizes:
                sizes[location] = _size_of(path, location)
            if end > sizes[location]:
                raise ModelError(
                    f"{path}: tensor {tensor.name!r:.100} ends at byte {end:,} of its external "
                    f"data {location!r}, which have {sizes[location]:,}; export the model again"
                )
    return [path.parent / location for location in sorted(sizes)]


def _claim(tensor: onnx.TensorProto, path: Path) -> tuple[str, int]:
    """Return the file that a tensor names, and the smallest size that the file must have."""
    told = {entry.key: entry.value for entry in tensor.external_data}
    try:
        start, length = int(told.get("offset") or 0), int(told.get("length") or 0)
    except ValueError:
        start = length = -1
    if start < 0 or length < 0 or not told.get("location"):
        raise ModelError(
            f"{path}: tensor {tensor.name!r:.100} names its external data by {told!s:.200}, "
            "expected a location, and offset and length in bytes; export the model again"
        )
    return told["location"], start + length


def _size_of(path: Path, location: str) -> int:
    """Return the size of a file in the model's folder; ModelError for any other path."""
    pure = PurePosixPath(location)
    leaves = pure.is_absolute() or ".." in pure.parts or "\\" in location or "\0" in location
    if leaves or not pure.parts or PureWindowsPath(location).drive:
        raise ModelError(
            f"{path}: its external data {location!r:.200} are outside of its folder; put them "
            "next to it, and export it with their name alone"
        )
    file = path.parent
    for part in pure.parts:
        file = file / part
        try:
            found = file.lstat()
        except OSError as error:
            raise ModelError(
                f"{path}: its external data {path.parent / pure} are missing "
                f"({error.strerror}); put them next to it"
            ) from error
        if stat.S_ISLNK(found.st_mode):
            raise ModelError(
                f"{path}: its external data {file} are a link, which could lead anywhere; put the "
                "file itself there"
            )
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        raise ModelError(
            f"{path}: its external data {file} are not a regular file, or one with "
            f"{found.st_nlink} names (hard links); put a copy there"
        )
    return found.st_size


def _load_external(proto: onnx.ModelProto, folder: Path, weights: WeightFile | None) -> int:
    """Load tensors from files, one by one; return the number of bytes that the model now contains.

    Initializers are put into ``weights`` if it accepts them.
    """
    held = 0
    kinds = ((False, _inner_tensors(proto)), (True, proto.graph.initializer))
    for is_initializer, tensors in kinds:
        for tensor in filter(uses_external_data, tensors):
            # A message keeps the memory of its former content for as long as the model exists.
            alone = copied(tensor)
            load_external_data_for_tensor(alone, str(folder))
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
            if is_initializer and weights and weights.takes(tensor, len(alone.raw_data)):
                weights.name(tensor, alone.raw_data)
            else:
                tensor.raw_data = alone.raw_data
                held += len(alone.raw_data)
    return held


def _inner_tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield all tensors of a model that are inside operators, subgraphs or functions."""
    yield from _inner_tensors_of(proto.graph)
    for function in proto.functions:
        for node in function.node:
            yield from _tensors_in(node)


def _inner_tensors_of(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in graph.node:
        yield from _tensors_in(node)


def _tensors_in(node: onnx.NodeProto) -> Iterator[onnx.TensorProto]:
    for attribute in node.attribute:
        yield from (attribute.t, *attribute.tensors)
        for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
            yield from (sparse.values, sparse.indices)
    for body in bodies(node):
        yield from body.initializer
        yield from _inner_tensors_of(body)


_ROWS = 2
"""Number of samples in a run that finds the shapes of outputs, if inference does not find them."""


def to_standard_form(proto: onnx.ModelProto) -> None:
    """Rewrite, in place, everything that differs from the ONNX standard only in form.

    The domain ``ai.onnx`` becomes the empty one; operator sets that are used but not imported are
    imported; sizes of 0 and below become unknown; graphs get names; of initializers with the same
    name, only the one that ONNX Runtime uses is kept; outputs get types and shapes. ModelError for
    defects that cannot be repaired.
    """
    _check_versions(proto)
    graphs = list(all_graphs(proto.graph))
    _rename_domains(proto, graphs)
    _import_domains(proto, graphs)
    for graph in graphs:
        graph.name = graph.name or "graph"
        _open_sizes(graph)
        last = {tensor.name: tensor for tensor in graph.initializer}
        if len(last) < len(graph.initializer):
            refill(graph.initializer, list(last.values()))
    _check_reads(proto.graph)
    _check_shapes(proto.graph)
    _describe_outputs(proto)


def _check_versions(proto: onnx.ModelProto) -> None:
    if not proto.ir_version or not proto.opset_import:
        missing = "opset_import" if proto.ir_version else "ir_version"
        raise ModelError(
            f"the file has no {missing}, so the version of ONNX that it is written in "
            "is unknown; export the model again"
        )
    if proto.ir_version > onnx.IR_VERSION:
        raise ModelError(
            f"the file is of IR version {proto.ir_version}, and the onnx package that is installed "
            f"here reads {onnx.IR_VERSION} at most; install a newer onnx and onnxruntime, or save "
            "the model with an older onnx"
        )


def _rename_domains(proto: onnx.ModelProto, graphs: Iterable[onnx.GraphProto]) -> None:
    nodes = [graph.node for graph in graphs] + [each.node for each in proto.functions]
    for node in chain.from_iterable(nodes):
        if node.domain == "ai.onnx":
            node.domain = ""
    for imports in (proto.opset_import, *(each.opset_import for each in proto.functions)):
        versions: dict[str, int] = {}
        for each in imports:
            domain = "" if each.domain == "ai.onnx" else each.domain
            versions[domain] = max(each.version, versions.get(domain, 0))
        refill(imports, [helper.make_opsetid(d, v) for d, v in versions.items()])


def _import_domains(proto: onnx.ModelProto, graphs: Iterable[onnx.GraphProto]) -> None:
    """Import used domains in their newest version, as ONNX Runtime does automatically."""
    known = {each.domain for each in proto.opset_import}
    for domain in dict.fromkeys(node.domain for graph in graphs for node in graph.node):
        if domain not in known:
            versions = [s.since_version for s in defs.get_all_schemas() if s.domain == domain]
            proto.opset_import.append(helper.make_opsetid(domain, max(versions, default=1)))


def _open_sizes(graph: onnx.GraphProto) -> None:
    for info in (*graph.input, *graph.output, *graph.value_info):
        for dim in info.type.tensor_type.shape.dim:
            if dim.HasField("dim_value") and dim.dim_value <= 0:
                dim.ClearField("dim_value")


def _check_reads(graph: onnx.GraphProto) -> None:
    """Raise ModelError if an operator reads a tensor that no earlier operator computes."""
    given = {info.name for info in graph.input} | {tensor.name for tensor in graph.initializer}
    given.update(tensor.values.name for tensor in graph.sparse_initializer)
    written = {name for node in graph.node for name in node.output}
    for node in graph.node:
        for name in (*node.input, *captured_names(node)):
            if name and name not in given:
                why = "is not an input or an initializer, and no operator computes it"
                if name in written:
                    why = "only later operators compute: the graph has a cycle"
                raise ModelError(
                    f"operator {node.name or node.output[0]!r} ({node.op_type}) reads {name!r}, "
                    f"which {why}; export the model again"
                )
        given.update(node.output)


def _check_shapes(graph: onnx.GraphProto) -> None:
    constants = {tensor.name for tensor in graph.initializer}
    for info in graph.input:
        kind = info.type.WhichOneof("value") or "tensor_type"
        known = kind != "tensor_type" or info.type.tensor_type.HasField("shape")
        if not known and info.name not in constants:
            raise ModelError(
                f"input {info.name!r} is not a tensor of known rank: its type or shape is missing "
                "in the file; export the model again, with a shape for every input (sizes in it "
                "may be open)"
            )


def _describe_outputs(proto: onnx.ModelProto) -> None:
    """Add types and shapes to outputs that lack them, by inference or by running the model."""
    vague = [output for output in proto.graph.output if _is_vague(output)]
    if not vague:
        return
    types: dict[str, TensorType] = {}
    with suppress(Exception):  # inference may fail on a file that was not checked yet
        types = infer_types(proto)
    if any((found := types.get(o.name)) is None or found.shape is None for o in vague):
        types = _types_of_run(proto)
    for output in vague:
        found = types[output.name]
        dims = [None if size == UNKNOWN else size for size in found.shape or ()]
        output.CopyFrom(helper.make_tensor_value_info(output.name, found.elem_type, dims))


def _is_vague(output: onnx.ValueInfoProto) -> bool:
    tensor = output.type.tensor_type
    if output.type.WhichOneof("value") not in (None, "tensor_type"):
        return False
    return not tensor.elem_type or not tensor.HasField("shape")


def _types_of_run(proto: onnx.ModelProto) -> dict[str, TensorType]:
    """Run a model on random inputs; return its outputs' types, with the rank but no sizes."""
    try:
        given: dict[str, Any] = GraphRunner(proto).run(random_inputs(proto, _ROWS))
    except RuntimeError as error:
        names = ", ".join(repr(output.name) for output in proto.graph.output if _is_vague(output))
        raise ModelError(
            f"the file has no type or shape of its output {names}, and running the model on random "
            "inputs, which would show them, fails; export it again with types of its outputs. ONNX "
            f"Runtime says: {error}"
        ) from error
    return {
        name: TensorType(
            elem_type=helper.np_dtype_to_tensor_dtype(array.dtype), shape=(UNKNOWN,) * array.ndim
        )
        for name, array in given.items()
    }
