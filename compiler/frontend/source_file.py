"""Reading the user's ONNX file and its external data, none of which is read before it is known.

A model file names the files that hold its weights. One from elsewhere could name any file of
whoever compiles it: so names that leave its folder, and links, are refused before they are opened.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath

import onnx
from google.protobuf.message import DecodeError
from onnx.external_data_helper import load_external_data_for_model, uses_external_data

from offramp.bundle.npz import open_regular
from offramp.compiler.common.errors import ModelError
from offramp.compiler.frontend.standard_form import to_standard_form
from offramp.compiler.graphs.graph import bodies, sort_operators

_TORCH = frozenset({".pt", ".pth", ".safetensors"})
"""Suffixes of torch's files."""
MAX_BYTES = 2**31 - 1
"""Limit of one protobuf message."""


def load_source(path: Path) -> tuple[onnx.ModelProto, str]:
    """Read and check a model file with its external data; give the model and their hash.

    Raises:
        ModelError: The file is missing, no ONNX model, or names files that it must not.
    """
    data = _read(path)
    digest, size = hashlib.sha256(data), len(data)
    try:
        proto = onnx.load_model_from_string(data)
    except DecodeError as error:
        raise ModelError(f"{path}: not an ONNX file; {_remedy(path)}") from error
    del data  # the checker makes two copies of its own
    if not proto.graph.node:
        raise ModelError(f"{path}: not an ONNX file, or one without operators")
    for file in _external_files(proto, path, size):
        with open_regular(file) as opened:
            for chunk in iter(partial(opened.read, 2**20), b""):
                digest.update(chunk)
    try:
        load_external_data_for_model(proto, str(path.parent))
        sort_operators(proto.graph)  # ONNX Runtime runs files in any order
        to_standard_form(proto)
        onnx.checker.check_model(proto)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    except (onnx.checker.ValidationError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"{path}: breaks a rule of ONNX, so that runtimes would refuse or misread it; export "
            f"the model again, with a newer exporter if there is one. The rule: {reason}"
        ) from error
    return proto, digest.hexdigest()


def _remedy(path: Path) -> str:
    if path.suffix in _TORCH:
        return (
            "it looks like a file of torch: export the model with torch.onnx.export, or call "
            "offramp.compile(module, data) from Python"
        )
    return "export the model to ONNX first"


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
    if size > MAX_BYTES:
        raise ModelError(
            f"{path}: {size / 2**30:.1f} GiB with its external data; models above 2 GiB are not "
            "supported yet, convert the weights to half precision"
        )


def _external_files(proto: onnx.ModelProto, path: Path, size: int) -> list[Path]:
    """Files with weights beside the model, all checked, and to fit into one message together."""
    sizes: dict[str, int] = {}
    for tensor in _tensors(proto):
        if uses_external_data(tensor):
            location, end = _claim(tensor, path)
            if location not in sizes:
                sizes[location] = _size_of(path, location)
            if end > sizes[location]:
                raise ModelError(
                    f"{path}: tensor {tensor.name!r:.100} ends at byte {end:,} of its external "
                    f"data {location!r}, which have {sizes[location]:,}; export the model again"
                )
    _check_size(path, size + sum(sizes.values()))
    return [path.parent / location for location in sorted(sizes)]


def _claim(tensor: onnx.TensorProto, path: Path) -> tuple[str, int]:
    """Give the file that a tensor names, and where in it the tensor ends at least."""
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
    """Give the size of a file below the model's folder; ModelError for all that leads elsewhere."""
    pure = PurePosixPath(location)
    leaves = pure.is_absolute() or ".." in pure.parts or "\\" in location or "\0" in location
    if leaves or not pure.parts or PureWindowsPath(location).drive:
        raise ModelError(
            f"{path}: its external data {location!r:.200} are outside of its folder; put them "
            "beside it, and export it with their name alone"
        )
    file = path.parent
    for part in pure.parts:
        file = file / part
        try:
            found = file.lstat()
        except OSError as error:
            raise ModelError(
                f"{path}: its external data {path.parent / pure} are missing "
                f"({error.strerror}); put them beside it"
            ) from error
        if stat.S_ISLNK(found.st_mode):
            raise ModelError(
                f"{path}: its external data {file} are a link, which could lead anywhere; put the "
                "file itself there"
            )
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        raise ModelError(
            f"{path}: its external data {file} are no regular file, or one with "
            f"{found.st_nlink} names (hard links); put a copy there"
        )
    return found.st_size


def _tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """All tensors of a model, those inside of operators, subgraphs and functions too."""
    yield from _tensors_of(proto.graph)
    for function in proto.functions:
        for node in function.node:
            yield from _tensors_in(node)


def _tensors_of(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
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
        yield from _tensors_of(body)
