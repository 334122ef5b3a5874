"""Create the bundle for the recordings from a compiled one.

    python -m tests.golden.make_fixture COMPILED.ee

Its profile, its policy and its records are those of the compiled bundle, at fewer exits and
samples. Its graphs look up the records: the model's input is the number of a sample, and an
exit gathers that sample's confidence and answer from a table. So every backend gets the
same bits on every machine.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

FOLDER = Path(__file__).parent
BUNDLE = FOLDER / "bundle"
FRESH = FOLDER / "fresh.npz"
"""Samples that the bundle's records do not have."""
EXITS = (0, 3, 6, 8, 10)
TUNE, CERTIFY, UNSEEN = 700, 1000, 700
"""Samples."""
CLASSES = 10
Arrays = dict[str, NDArray[Any]]


def main() -> None:
    """Write the bundle and the data next to this file."""
    source = Path(sys.argv[1])
    with np.load(source / "records.npz") as archive:
        records = dict(archive)
    rows = np.concatenate(
        [
            np.flatnonzero(records["split"] == 1)[:TUNE],
            np.flatnonzero(records["split"] == 2)[: CERTIFY + UNSEEN],
        ]
    )
    table = {name: array[..., rows] for name, array in records.items()}
    table |= {name: table[name][list(EXITS)] for name in ("confidence", "prediction")}
    known = {name: array[..., : TUNE + CERTIFY] for name, array in table.items()}
    manifest, policy = _json(source / "manifest.json"), _json(source / "policy.json")
    profile = _json(source / "profiles" / "cpu.json")
    manifest, last = _manifest(manifest), float(len(rows) - 1)
    policy["active"] = [
        {**active, "exit": EXITS.index(active["exit"])} for active in policy["active"]
    ]
    for name in ("exits_ms", "stages_ms"):
        profile[name] = [profile[name][index] for index in EXITS]
    files = {
        **_graphs(manifest, table),
        "policy.json": _dump(policy),
        "profiles/cpu.json": _dump(profile),
        "records.npz": _npz(known),
        "input_ranges.json": _dump(
            {"inputs": [{"name": "sample", "lowest": 0.0, "highest": last}]}
        ),
    }
    _weigh(manifest, files)
    manifest["files"] = [
        {
            "path": name,
            "size_bytes": len(files[name]),
            "sha256": hashlib.sha256(files[name]).hexdigest(),
        }
        for name in sorted(files)
    ]
    files["manifest.json"] = _dump(manifest)
    digest = hashlib.sha256(files["manifest.json"]).hexdigest()
    files["manifest.sha256"] = f"{digest}\n".encode()
    for name, content in files.items():
        (BUNDLE / name).parent.mkdir(parents=True, exist_ok=True)
        (BUNDLE / name).write_bytes(content)
    unseen = np.arange(TUNE + CERTIFY, len(rows))
    fresh = {"sample": unseen[:, None].astype(np.int64), "label": table["label"][unseen]}
    FRESH.write_bytes(_npz(fresh))


def _manifest(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest with another input, and fewer exits."""
    manifest["name"] = "recorded"
    manifest["inputs"] = [{"name": "sample", "dtype": "int64", "shape": ["batch", 1]}]
    manifest["segments"][0]["inputs"] = ["sample"]
    exits = [manifest["exits"][index] for index in EXITS]
    for index, exit_ in enumerate(exits):
        exit_ |= {"index": index, "file": f"exits/{index:02d}.onnx"}
    manifest["exits"] = exits
    manifest["calibration"] |= {
        "tune_samples": TUNE,
        "certify_samples": CERTIFY,
        "sample_shapes": {"sample": [1]},
    }
    return manifest


def _weigh(manifest: dict[str, Any], files: dict[str, bytes]) -> None:
    """Note what crosses each border, a sample's number, and the weights before it."""
    sizes = {}
    for name, content in files.items():
        if name.endswith(".onnx"):
            weights = onnx.load_model_from_string(content).graph.initializer
            sizes[name] = sum(numpy_helper.to_array(w).nbytes for w in weights)
    exits = {exit_["after_segment"]: sizes[exit_["file"]] for exit_ in manifest["exits"]}
    for segment in manifest["segments"]:
        index = segment["index"]
        segment["row_bytes"] = 8 if segment is not manifest["segments"][-1] else 0
        segment["weight_bytes"] = sizes[segment["file"]] + exits.get(index, 0)


def _graphs(manifest: dict[str, Any], table: Arrays) -> dict[str, bytes]:
    """Every graph of the bundle, by file."""
    answer = manifest["answer"]["output"]
    files = {}
    for segment in manifest["segments"]:
        (given,) = segment["inputs"]
        if segment["output"] == answer:
            nodes, weights = _answer(given, answer, table["final_prediction"])
            outputs = [_float(answer, CLASSES)]
        else:
            nodes = [helper.make_node("Identity", [given], [segment["output"]])]
            weights, outputs = [], [_ids(segment["output"])]
        files[segment["file"]] = _model(nodes, weights, given, outputs)
    for exit_ in manifest["exits"]:
        (given,) = exit_["inputs"]
        nodes, weights = _answer(given, exit_["output"], table["prediction"][exit_["index"]])
        sure = exit_["confidence"]
        nodes += [
            helper.make_node("Squeeze", [given, f"{sure}/axis"], [f"{sure}/row"]),
            helper.make_node("Gather", [f"{sure}/table", f"{sure}/row"], [sure]),
        ]
        weights += [
            numpy_helper.from_array(np.array([1]), f"{sure}/axis"),
            numpy_helper.from_array(table["confidence"][exit_["index"]], f"{sure}/table"),
        ]
        outputs = [_float(exit_["output"], CLASSES), _float(sure)]
        files[exit_["file"]] = _model(nodes, weights, given, outputs)
    nodes, weights = _answer("sample", answer, table["final_prediction"])
    files[manifest["source"]["file"]] = _model(nodes, weights, "sample", [_float(answer, CLASSES)])
    return files


def _answer(given: str, output: str, prediction: NDArray[np.int32]) -> tuple[list[Any], list[Any]]:
    """Logits that are 1 at the recorded class and 0 elsewhere."""
    nodes = [
        helper.make_node("Gather", [f"{output}/table", given], [f"{output}/class"]),
        helper.make_node("Equal", [f"{output}/class", f"{output}/classes"], [f"{output}/is"]),
        helper.make_node("Cast", [f"{output}/is"], [output], to=TensorProto.FLOAT),
    ]
    weights = [
        numpy_helper.from_array(prediction.astype(np.int32), f"{output}/table"),
        numpy_helper.from_array(np.arange(CLASSES, dtype=np.int32), f"{output}/classes"),
    ]
    return nodes, weights


def _model(nodes: list[Any], weights: list[Any], given: str, outputs: list[Any]) -> bytes:
    graph = helper.make_graph(nodes, "recorded", [_ids(given)], outputs, weights)
    opsets = [helper.make_opsetid("", 17)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8, producer_name="recorded")
    onnx.checker.check_model(model)
    content: bytes = model.SerializeToString()
    return content


def _ids(name: str) -> Any:
    return helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", 1])


def _float(name: str, *more: int) -> Any:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", *more])


def _npz(arrays: Arrays) -> bytes:
    """An archive that does not name the time."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            content = io.BytesIO()
            np.save(content, array)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), content.getvalue())
    return buffer.getvalue()


def _json(path: Path) -> Any:
    return json.loads(path.read_text())


def _dump(document: Any) -> bytes:
    return f"{json.dumps(document, indent=1)}\n".encode()


if __name__ == "__main__":
    main()
