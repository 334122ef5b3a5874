"""Bundles to build engines of, made without training: their exits have random weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from offramp.bundle import (
    ActiveExit,
    Bundle,
    Exit,
    ExitPolicy,
    Head,
    Manifest,
    Segment,
    write_bundle,
)
from offramp.bundle.manifest import SCHEMA_VERSION, Calibration, Source
from offramp.compiler.slicing import Sliced
from tests.sliced import inputs_of, sliced


def engine_bundle(
    model: str,
    path: Path,
    *,
    exits_after: Sequence[int] = (0, 1),
    active: Sequence[ActiveExit] = (ActiveExit(exit=1, threshold=0.5),),
) -> Bundle:
    """Write a bundle of a model of tests/sliced.py.

    Args:
        model: Its name there.
        path: Where to.
        exits_after: Segments that get an exit.
        active: The policy.
    """
    pieces = sliced(model)
    segments = tuple(
        Segment(
            index=s.index,
            file=f"segments/{s.index:02d}.onnx",
            inputs=s.inputs,
            output=s.output,
            flops_share=s.flops_share,
        )
        for s in pieces.segments
    )
    exits = tuple(_exit(pieces, index, after) for index, after in enumerate(exits_after))
    files = {s.file: g for s, g in zip(segments, pieces.graphs, strict=True)}
    files |= {e.file: _head(pieces, e) for e in exits}
    files["source.onnx"] = pieces.model.proto.SerializeToString()
    samples = inputs_of(pieces, 1)
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        name=path.stem,
        created_utc="2026-01-02T03:04:05+00:00",
        tools={},
        source=Source(
            file="source.onnx", original_name="m.onnx", original_sha256="0" * 64, opset=17
        ),
        inputs=pieces.model.inputs,
        outputs=pieces.model.outputs,
        answer=pieces.model.answer,
        segments=segments,
        exits=exits,
        calibration=Calibration(
            data_sha256="1" * 64,
            train_samples=1,
            tune_samples=1,
            certify_samples=1,
            sample_shapes={name: array.shape[1:] for name, array in samples.items()},
            reference_batch_size=8,
        ),
        verified_tolerance=1e-5,
    )
    return write_bundle(path, manifest, ExitPolicy(version=1, active=tuple(active)), files)


def _exit(pieces: Sliced, index: int, after: int) -> Exit:
    return Exit(
        index=index,
        after_segment=after,
        file=f"exits/{index:02d}.onnx",
        inputs=(pieces.cuts[after].name,),
        output=f"exit{index}/answer",
        confidence=f"exit{index}/confidence",
        head=Head(kind="mean"),
        agreement=0.5,
    )


def _head(pieces: Sliced, exit_: Exit) -> bytes:
    """The mean over tokens or pixels, a linear layer, and the largest probability."""
    cut, answer = pieces.cuts[exit_.after_segment], pieces.model.answer
    width_axis, pooled_axes = {2: (1, []), 3: (2, [1]), 4: (1, [2, 3])}[cut.rank]
    width = cut.shape[width_axis]
    assert isinstance(width, int)
    weight = np.random.default_rng(exit_.index).standard_normal((width, answer.classes))
    stem = f"exit{exit_.index}"
    names = {"cut": cut.name, "pooled": cut.name}
    nodes = []
    if pooled_axes:
        names["pooled"] = f"{stem}/pooled"
        nodes.append(
            helper.make_node(
                "ReduceMean", [cut.name], [names["pooled"]], axes=pooled_axes, keepdims=0
            )
        )
    logits = exit_.output if answer.form == "logits" else f"{stem}/logits"
    chances = f"{stem}/chances" if answer.form == "logits" else exit_.output
    nodes += [
        helper.make_node("MatMul", [names["pooled"], f"{stem}/weight"], [logits]),
        helper.make_node("Softmax", [logits], [chances], axis=-1),
        helper.make_node("ReduceMax", [chances], [exit_.confidence], axes=[1], keepdims=0),
    ]
    graph = helper.make_graph(
        nodes,
        stem,
        [helper.make_tensor_value_info(cut.name, TensorProto.FLOAT, cut.shape)],
        [
            helper.make_tensor_value_info(
                exit_.output, TensorProto.FLOAT, ["batch", answer.classes]
            ),
            helper.make_tensor_value_info(exit_.confidence, TensorProto.FLOAT, ["batch"]),
        ],
        initializer=[numpy_helper.from_array(weight.astype(np.float32), f"{stem}/weight")],
    )
    opset = pieces.model.proto.opset_import[0].version
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    made.ir_version = pieces.model.proto.ir_version
    onnx.checker.check_model(made)
    content: bytes = made.SerializeToString()
    return content
