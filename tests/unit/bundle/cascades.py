"""A small bundle of precision int8 made by hand; contents are no real graphs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.unit.bundle import examples

from offramp.bundle import Bundle, Exit, Head, Manifest, Profile, Segment
from offramp.bundle.files import dump

SEGMENTS = (
    Segment(index=0, file="segments/00.onnx", inputs=("image",), output="q/cut", flops_share=0.25),
    Segment(
        index=1, file="segments/01.onnx", inputs=("q/cut",), output="q/logits", flops_share=0.75
    ),
    Segment(index=2, file="source.onnx", inputs=("image",), output="logits", flops_share=1.0),
)

OWN = Exit(
    index=1,
    after_segment=1,
    file="exits/01.onnx",
    inputs=("q/logits",),
    output="offramp_exit_01/logits",
    confidence="offramp_exit_01/confidence",
    head=Head(kind="own"),
    agreement=0.99,
)

CASCADE_PROFILE = Profile(
    device="cpu",
    threads=1,
    batch_sizes=(1, 8),
    source_ms=(4.0, 20.0),
    segments_ms=((0.5, 2.0), (0.5, 3.0), (4.0, 20.0)),
    exits_ms=((0.25, 0.5), (0.0, 0.0)),
    stages_ms=((0.125, 0.25), (0.125, 0.25)),
)


def cascade_manifest(**changes: Any) -> Manifest:
    first = replace(examples.MANIFEST.exits[0], inputs=("q/cut",))
    known = {"segments": SEGMENTS, "exits": (first, OWN), "precision": "int8"}
    return replace(examples.MANIFEST, **{**known, **changes})


CASCADE_FILES = {
    **examples.FILES,
    "exits/01.onnx": b"the own answer",
    "profiles/cpu.json": dump(CASCADE_PROFILE),
}


def write_cascade(folder: Path) -> Bundle:
    return examples.write(folder, manifest=cascade_manifest(), files=CASCADE_FILES)
