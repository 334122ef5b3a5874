"""A small bundle made by hand: two segments, one exit, contents that are no real graphs."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from offramp.bundle import (
    ActiveExit,
    Answer,
    Bundle,
    Exit,
    ExitPolicy,
    Head,
    Manifest,
    Profile,
    Promise,
    Segment,
    TensorSpec,
    write_bundle,
)
from offramp.bundle.files import dump
from offramp.bundle.schema.manifest import Calibration, Source
from offramp.bundle.schema.parts import HeadScore

HEAD = Head(kind="grid", grid=2, hidden=64)

MANIFEST = Manifest(
    name="small",
    created_utc="2026-01-02T03:04:05+00:00",
    tools={"offramp": "0.1.0", "python": "3.11.9"},
    source=Source(file="source.onnx", original_name="m.onnx", original_sha256="0" * 64, opset=17),
    inputs=(TensorSpec(name="image", dtype="uint8", shape=("batch", 1, 28, 28)),),
    outputs=(TensorSpec(name="logits", dtype="float32", shape=("batch", 10)),),
    answer=Answer(output="logits", classes=10, form="logits"),
    segments=(
        Segment(
            index=0, file="segments/00.onnx", inputs=("image",), output="cut", flops_share=0.25
        ),
        Segment(
            index=1, file="segments/01.onnx", inputs=("cut",), output="logits", flops_share=0.75
        ),
    ),
    exits=(
        Exit(
            index=0,
            after_segment=0,
            file="exits/00.onnx",
            inputs=("cut",),
            output="offramp_exit_00/logits",
            confidence="exit/confidence",
            head=HEAD,
            agreement=0.875,
            trials=(HeadScore(head=HEAD, agreement=0.9, cost_ms=0.5, net_savings=-0.25),),
        ),
    ),
    calibration=Calibration(
        data_sha256="1" * 64,
        train_samples=600,
        tune_samples=150,
        certify_samples=250,
        sample_shapes={"image": (1, 28, 28)},
        reference_batch_size=8,
        source_accuracy=0.5,
    ),
    verified_tolerance=1e-5,
)

POLICY = ExitPolicy(
    version=1,
    active=(ActiveExit(exit=0, threshold=0.9),),
    promise=Promise(
        max_disagreement=0.01,
        confidence_level=0.95,
        certify_samples=250,
        certify_errors=0,
        p_value=0.04,
        predicted_savings=0.3,
    ),
)

PROFILE = Profile(
    device="cpu",
    threads=1,
    batch_sizes=(1, 8),
    source_ms=(4.0, 20.0),
    segments_ms=((1.0, 5.0), (3.0, 15.0)),
    exits_ms=((0.25, 0.5),),
    stages_ms=((0.125, 0.25),),
)


def graph(text: str) -> bytes:
    """Return an empty model with a producer name; bundles read only weights."""
    return b"\x12" + bytes([len(text)]) + text.encode()


FILES = {
    "source.onnx": graph("the source"),
    "segments/00.onnx": graph("first half"),
    "segments/01.onnx": graph("second half"),
    "exits/00.onnx": graph("an exit"),
    "profiles/cpu.json": dump(PROFILE),
    "records.npz": b"records",
    "report.html": b"<p>report</p>",
}

NAMES = (*FILES, "policy.json", "manifest.json", "manifest.sha256")
"""Every file of the bundle."""


def write(folder: Path, **changes: Any) -> Bundle:
    arguments = {"manifest": MANIFEST, "policy": POLICY, "files": FILES, **changes}
    return write_bundle(folder / "small.ee", **arguments)


def rewrite_manifest(root: Path, change: Any) -> None:
    """Apply ``change`` to the plain manifest and sign it again, as an attacker can."""
    plain = json.loads((root / "manifest.json").read_text())
    change(plain)
    sign(root, json.dumps(plain).encode())


def sign(root: Path, document: bytes) -> None:
    (root / "manifest.json").write_bytes(document)
    (root / "manifest.sha256").write_text(f"{hashlib.sha256(document).hexdigest()}\n")


def replace_file(root: Path, name: str, content: bytes) -> None:
    """Replace a file and mend its hash in the manifest."""
    (root / name).write_bytes(content)

    def mend(plain: Any) -> None:
        for entry in plain["files"]:
            if entry["path"] == name:
                entry["size_bytes"] = len(content)
                entry["sha256"] = hashlib.sha256(content).hexdigest()

    rewrite_manifest(root, mend)


def everything_under(folder: Path) -> dict[str, bytes]:
    """Content of all files below a folder, hidden ones too."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def agreeing_records() -> bytes:
    """Records of four samples, one of them to tune on, all answered like the model."""
    answers = np.zeros(4, np.int32)
    content = io.BytesIO()
    np.savez(
        content,
        confidence=np.full((1, 4), 0.95, np.float32),
        prediction=answers[None],
        final_prediction=answers,
        final_confidence=np.full(4, 0.95, np.float32),
        split=np.array([1, 2, 2, 2], np.uint8),
    )
    return content.getvalue()
