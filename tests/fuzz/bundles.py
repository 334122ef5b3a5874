"""Bundles with random changes and valid hashes, as an attacker would sign them.

``mutations`` yields them endlessly and deterministically for a seed. All pass the hash check (a few
change the data of the check itself), so only the schema prevents a crash or a wrong answer.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import random
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

Files = dict[str, bytes]
MANIFEST, SIGNATURE = "manifest.json", "manifest.sha256"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """A changed bundle."""

    kind: str
    """Changed part: ``json``, ``text``, ``npz``, ``onnx`` or ``files``."""
    told: str
    """Description of the change, for messages."""
    files: Mapping[str, bytes]
    """The whole bundle, by relative path."""

    def write(self, root: Path) -> None:
        """Write the bundle; names that lead elsewhere are in its manifest only."""
        for name, content in self.files.items():
            place = root / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)


def mutations(bundle: Path, seed: int, start: int = 0) -> Iterator[Mutation]:
    """Changed versions of a bundle, without end, from one on; each has one to three changes."""
    whole = {
        place.relative_to(bundle).as_posix(): place.read_bytes()
        for place in sorted(bundle.rglob("*"))
        if place.is_file()
    }
    number = start
    while True:
        rng = random.Random(f"{seed}/{number}")
        kind = rng.choice(list(_MUTATORS))
        files, told = dict(whole), []
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            try:
                told.append(_MUTATORS[kind](files, rng))
            except Exception:  # what an earlier change left is nothing that can be changed so
                told.append("left")
            sign(files)
        yield Mutation(kind=kind, told="; ".join(told), files=files)
        number += 1


def sign(files: Files) -> None:
    """Update the hash of every listed file, and of the manifest."""
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        plain = json.loads(files[MANIFEST])
        told = json.dumps(plain)
        for entry in plain["files"]:
            content = files.get(entry["path"])
            if content is not None:
                entry["size_bytes"] = len(content)
                entry["sha256"] = hashlib.sha256(content).hexdigest()
        if json.dumps(plain) != told:  # else every byte of it stays as it was made
            files[MANIFEST] = json.dumps(plain).encode()
    files[SIGNATURE] = f"{hashlib.sha256(files[MANIFEST]).hexdigest()}\n".encode()


# ---------------------------------------------------------------------------------------------
# JSON: values and structure


def _mutate_json(files: Files, rng: random.Random) -> str:
    name = rng.choice([n for n in files if n.endswith(".json")])
    plain = json.loads(files[name])
    places = list(_places(plain))
    # Whole branches as often as leaves, though leaves are many more.
    leaves = [p for p in places if not isinstance(_at(plain, p), dict | list)]
    path = rng.choice(leaves if leaves and rng.random() < 0.7 else places)
    told = _change(plain, path, rng)
    files[name] = json.dumps(plain).encode()
    return f"{name}{list(path)}: {told}"


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, inner in items:
        yield (*path, key)
        yield from _places(inner, (*path, key))


def _at(plain: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        plain = plain[key]
    return plain


def _change(plain: Any, path: tuple[Any, ...], rng: random.Random) -> str:
    parent, key = _at(plain, path[:-1]), path[-1]
    action = rng.choice(
        ["value", "value", "value", "near", "near", "near", "drop", "twice", "move"]
    )
    old = parent[key]
    if action == "drop":
        del parent[key]
        return "dropped"
    if action == "twice" and isinstance(parent, list):
        parent.insert(key, json.loads(json.dumps(old)))
        return "twice"
    if action == "move":
        other = rng.choice(list(_places(plain)))
        parent[key] = json.loads(json.dumps(_at(plain, other)))
        return f"as {list(other)}"
    new = _near(old, rng) if action == "near" else rng.choice(_VALUES)
    parent[key] = new
    return f"{str(old)[:40]!r} became {str(new)[:40]!r}"


_VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 2, 7, 255, 2**31, 2**53 + 1, 2**63, 2**64, 10**300, -(10**300),
    0.5, -0.5, 1.5, 1e-308, 1e308, -1e308, float("nan"), float("inf"), -float("inf"),
    "", "x", "batch", "cpu", "0", "\ud800", "\0", "a\nb", "../x", "/etc/passwd", "source.onnx",
    "x" * 10_000, "logits", "probabilities", "float64", "uint8", "object", "f4,f4",
    [], {}, [[]], [None], [1, 2], ["x"], {"x": 1}, {"": {}}, [1] * 1000,
    json.loads("[" * 200 + "]" * 200),
]  # fmt: skip


def _near(old: Any, rng: random.Random) -> Any:
    if isinstance(old, bool) or old is None:
        return not old
    if isinstance(old, int):
        return rng.choice([old + 1, old - 1, -old, old * 2, old * 1000, float(old), str(old)])
    if isinstance(old, float):
        return rng.choice([-old, old * 2, old / 2, old + 1, 1 - old, old * 1e6, 0.0, int(old)])
    if isinstance(old, str):
        return rng.choice([old + "x", old[:-1], old.upper(), old.replace("0", "1"), old[::-1]])
    if isinstance(old, list):
        return rng.choice(
            [old[:-1], old[::-1], old + old[-1:], old[1:], [], rng.sample(old, len(old))]
        )
    return dict(list(old.items())[:-1])


def _mutate_text(files: Files, rng: random.Random) -> str:
    """Change the bytes of a JSON file, so that it may be no JSON any more."""
    name = rng.choice([n for n in files if n.endswith(".json")])
    content = files[name]
    place = rng.randrange(max(len(content), 1))
    inserted = rng.choice(
        [b"", b"{", b"]", b",", b'"', b"\xff\xfe", b"[" * 100_000, b"9" * 5000, b"NaN",
         b"-Infinity", b"1e999", b'{"a":' * 5000, b"\0", b'"x":1,']
    )  # fmt: skip
    cut = rng.choice([0, 0, 1, 5, len(content)])
    files[name] = content[:place] + inserted + content[place + cut :]
    return f"{name}: {inserted[:12]!r} for {cut} bytes at {place}"


# ---------------------------------------------------------------------------------------------
# npz: members, headers, values


def _mutate_npz(files: Files, rng: random.Random) -> str:
    name = rng.choice([n for n in files if n.endswith(".npz")])
    how = rng.choice([_change_arrays, _change_arrays, _change_members, _lie, _change_bytes])
    return f"{name}: {how(files, name, rng)}"


def _arrays(content: bytes) -> dict[str, Any]:
    with np.load(io.BytesIO(content), allow_pickle=True) as archive:
        arrays = dict(archive)
    if any(size > 2**30 for array in arrays.values() for size in array.shape):
        raise ValueError("numpy would write an empty array of that shape for ever")
    return arrays


def _save(arrays: Mapping[str, Any]) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **{k: np.asarray(v) for k, v in arrays.items()})
    return stream.getvalue()


def _change_arrays(files: Files, name: str, rng: random.Random) -> str:
    arrays = _arrays(files[name])
    chosen = rng.choice(list(arrays))
    array = np.asarray(arrays[chosen])
    changes: dict[str, Callable[[], Any]] = {
        "dropped": lambda: None,
        "empty": lambda: array[:0],
        "shorter": lambda: array[..., :-1],
        "longer": lambda: np.concatenate([array, array], axis=-1),
        "transposed": array.T.copy,
        "a scalar": lambda: array.ravel()[0],
        "one dimension more": lambda: array[None],
        "float64": lambda: array.astype(np.float64),
        "int64": lambda: array.astype(np.int64),
        "text": lambda: array.astype("U8"),
        "complex": lambda: array.astype(complex),
        "another byte order": lambda: array.astype(array.dtype.newbyteorder()),
        "objects": lambda: array.astype(object),
        "structured": lambda: np.zeros(3, "i4,f4"),
        "Fortran order": lambda: np.asfortranarray(array),
        "doubled": lambda: array * 2,
        "negative": lambda: np.negative(array.astype(float)).astype(array.dtype),
        "all ones": lambda: np.ones_like(array),
        "all zero": lambda: np.zeros_like(array),
        "the largest value": lambda: np.full_like(array, _largest(array.dtype)),
        "NaN": lambda: _with_nan(array),
    }
    told = rng.choice(list(changes))
    changed = changes[told]()
    if changed is None:
        del arrays[chosen]
    else:
        arrays[chosen] = changed
    files[name] = _save(arrays)
    return f"{chosen} {told}"


def _largest(dtype: np.dtype[Any]) -> Any:
    if dtype.kind in "iu":
        return np.iinfo(dtype).max
    return np.finfo(dtype).max if dtype.kind == "f" else dtype.type()


def _with_nan(array: np.ndarray[Any, Any]) -> Any:
    if array.dtype.kind != "f" or not array.size:
        return array
    changed = array.copy()
    changed.ravel()[0] = np.nan
    return changed


def _change_members(files: Files, name: str, rng: random.Random) -> str:
    told = rng.choice(
        ["renamed", "added", "not an array", "twice", "deflated bomb", "none"] * 3 + ["many"]
    )
    arrays = _arrays(files[name])
    chosen = rng.choice(list(arrays) or ["x"])
    if told == "renamed":
        arrays = {(k + "x" if k == chosen else k): v for k, v in arrays.items()}
        files[name] = _save(arrays)
        return f"{chosen} {told}"
    if told in ("added", "none"):
        files[name] = _save({**arrays, "more": np.zeros(3)} if told == "added" else {})
        return told
    stream = io.BytesIO(_save(arrays))
    with zipfile.ZipFile(stream, "a", zipfile.ZIP_DEFLATED) as archive:
        if told == "not an array":
            archive.writestr("readme.txt", "hello")
        elif told == "twice":
            with warnings.catch_warnings(action="ignore"):
                archive.writestr(f"{chosen}.npy", b"again")
        elif told == "many":
            for index in range(12_000):
                archive.writestr(f"a{index}.npy", b"")
        else:
            archive.writestr("bomb.npy", header("<f8", (2**22,)) + bytes(2**25))
    files[name] = stream.getvalue()
    return told


def header(descr: Any, shape: Any) -> bytes:
    """Return the header of a ``.npy`` file with these fields."""
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape!r}, }}\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()


_HEADERS: list[tuple[Any, Any]] = [
    ("<f8", (2**40,)), ("<f8", (2**62, 2**62)), ("<f4", (-1,)), ("<f4", (-1, -1)), ("|O", (3,)),
    ("<f4", ()), ("<U0", (2**60,)), ("|V99999999", (1000,)), ("<f4", (0, 2**62)), ("junk", (1,)),
    ("<f4", (1.5,)), ("<f4", "x"), ([("a", "<f4")] * 3, (1,)), ("<M8[ns]", (1,)),
    ("<f2", (1,) * 70), (("<f4", (2, 2)), (3,)), ("(" * 500, (1,)), (None, (1,)), ("<f4", (True,)),
]  # fmt: skip


def _lie(files: Files, name: str, rng: random.Random) -> str:
    """Replace a member's header by one that describes more data than there are."""
    arrays = _arrays(files[name])
    chosen = rng.choice(list(arrays) or ["x"])
    descr, shape = rng.choice(_HEADERS)
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for key, array in arrays.items():
            if key == chosen:
                archive.writestr(f"{key}.npy", header(descr, shape) + bytes(64))
            else:
                inner = io.BytesIO()
                np.save(inner, np.asarray(array))
                archive.writestr(f"{key}.npy", inner.getvalue())
    files[name] = stream.getvalue()
    return f"{chosen} says {str((descr, shape))[:60]}"


def _change_bytes(files: Files, name: str, rng: random.Random) -> str:
    content = bytearray(files[name])
    for _ in range(rng.choice([1, 4, 32])):
        if content:
            # The directory at the end is what a reader goes by.
            start = rng.choice([0, max(0, len(content) - 300)])
            content[rng.randrange(start, len(content))] = rng.randrange(256)
    if rng.random() < 0.2:
        del content[rng.randrange(len(content) + 1) :]
    files[name] = bytes(content)
    return "bytes"


# ---------------------------------------------------------------------------------------------
# ONNX: graphs that are none, or others


def _mutate_onnx(files: Files, rng: random.Random) -> str:
    name = rng.choice([n for n in files if n.endswith(".onnx")])
    model = onnx.ModelProto.FromString(files[name])
    how = rng.choice([_bytes_of, _nodes, _nodes, _weights, _weights, _signature, _signature])
    told, content = how(model, files[name], rng)
    files[name] = content
    return f"{name}: {told}"


def _bytes_of(_: Any, content: bytes, rng: random.Random) -> tuple[str, bytes]:
    changed = bytearray(content)
    for _ in range(rng.choice([1, 3, 20])):
        if changed:
            changed[rng.randrange(len(changed))] = rng.randrange(256)
    if rng.random() < 0.3:
        del changed[rng.randrange(len(changed) + 1) :]
    return "bytes", bytes(changed)


def _nodes(model: Any, content: bytes, rng: random.Random) -> tuple[str, bytes]:
    nodes = model.graph.node
    if not nodes:
        return "left", content
    node = rng.choice(nodes)
    told = rng.choice(
        ["dropped", "another operator", "attribute", "input", "output", "twice", "cycle"]
    )
    if told == "dropped":
        nodes.remove(node)
    elif told == "another operator":
        node.op_type = rng.choice(
            ["Relu", "Add", "Loop", "If", "Nonsense", "Reshape", "Softmax", ""]
        )
    elif told == "attribute" and node.attribute:
        attribute = rng.choice(node.attribute)
        attribute.i, attribute.type = rng.choice([-1, 2**40, 7]), rng.choice([1, 2, 7])
    elif told == "input" and node.input:
        node.input[rng.randrange(len(node.input))] = rng.choice(["", "nowhere", *_names(model)])
    elif told == "output" and node.output:
        node.output[rng.randrange(len(node.output))] = rng.choice(["", "x", *_names(model)])
    elif told == "cycle" and node.input and node.output:
        node.input[0] = node.output[0]
    else:
        nodes.add().CopyFrom(node)
    return f"node {told}", model.SerializeToString()


def _names(model: Any) -> list[str]:
    return [name for node in model.graph.node for name in (*node.input, *node.output)]


def _weights(model: Any, content: bytes, rng: random.Random) -> tuple[str, bytes]:
    tensors = model.graph.initializer
    if not tensors:
        return "left", content
    tensor = rng.choice(tensors)
    told = rng.choice(["dropped", "dims", "type", "short", "elsewhere", "random"])
    if told == "dropped":
        tensors.remove(tensor)
    elif told == "dims":
        tensor.dims[:] = rng.choice([[], [0], [-1], [2**40, 2**40], [1], [*tensor.dims, 1]])
    elif told == "type":
        tensor.data_type = rng.choice([0, 1, 2, 7, 8, 9, 10, 16, 99])
    elif told == "short":
        tensor.raw_data = tensor.raw_data[: len(tensor.raw_data) // 2]
    elif told == "elsewhere":
        tensor.data_location = onnx.TensorProto.EXTERNAL
        entries = tensor.external_data
        places = ["../x", "/etc/passwd", "w.bin", "weights.bin"]
        if entries and rng.random() < 0.5:
            rng.choice(entries).value = rng.choice([*places, "0", "4096", "8191", str(2**63), "-1"])
        else:
            entries.add(key="location", value=rng.choice(places))
        tensor.ClearField("raw_data")
    elif tensor.raw_data:
        tensor.raw_data = rng.randbytes(len(tensor.raw_data))
    return f"weight {told}", model.SerializeToString()


def _signature(model: Any, content: bytes, rng: random.Random) -> tuple[str, bytes]:
    graph = model.graph
    if not graph.output:
        return "left", content
    value = rng.choice([*graph.input, *graph.output])
    told = rng.choice(["renamed", "type", "rank", "size", "no outputs", "opset", "no inputs"])
    dims = value.type.tensor_type.shape.dim
    if told == "renamed":
        value.name += "x"
    elif told == "type":
        value.type.tensor_type.elem_type = rng.choice([0, 1, 6, 7, 8, 10, 11, 99])
    elif told == "rank":
        dims.add().dim_value = 3
    elif told == "size" and dims:
        rng.choice(dims).dim_value = rng.choice([0, 1, 3, 2**40])
    elif told == "no outputs":
        del graph.output[:]
    elif told == "no inputs":
        del graph.input[:]
    elif told == "opset" and model.opset_import:
        model.opset_import[0].version = rng.choice([0, 1, 6, 12, 99, 2**40])
    return f"{value.name[:30]} {told}", model.SerializeToString()


# ---------------------------------------------------------------------------------------------
# Files: which there are, and what is in which


def _mutate_files(files: Files, rng: random.Random) -> str:
    others = [n for n in files if n not in (MANIFEST, SIGNATURE)]
    name, other = rng.sample(others, 2)
    told = rng.choice(["swapped", "copied", "empty", "gone", "unlisted", "stranger", "huge"])
    if told == "swapped":
        files[name], files[other] = files[other], files[name]
    elif told == "copied":
        files[name] = files[other]
    elif told == "empty":
        files[name] = b""
    elif told == "huge":
        files[name] += bytes(2**20)
    else:
        _unlist(files, name, gone=told == "gone", stranger=told == "stranger")
    return f"{name} {told} ({other})"


def _unlist(files: Files, name: str, *, gone: bool, stranger: bool) -> None:
    plain = json.loads(files[MANIFEST])
    if stranger:
        plain["files"].append({"path": "stranger.bin", "size_bytes": 0, "sha256": "0" * 64})
        files["stranger.bin"] = b"stranger"
    else:
        plain["files"] = [e for e in plain["files"] if e["path"] != name]
    files[MANIFEST] = json.dumps(plain).encode()
    if gone:
        del files[name]


_MUTATORS: dict[str, Callable[[Files, random.Random], str]] = {
    "json": _mutate_json,
    "text": _mutate_text,
    "npz": _mutate_npz,
    "onnx": _mutate_onnx,
    "files": _mutate_files,
}
