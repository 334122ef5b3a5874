"""Bundles without training: a model in pieces, with plain exits of random weights.

They need no torch, so that they can be made on a GPU machine. Confidences are random, which is
enough for tests; for measurements they are *replayed*: confidences are an additional input of the
model. So the sender of samples decides where each sample leaves, while the full cost of an exit is
measured.

Latencies and records in the bundle are made up, only because serving needs them: nothing was
measured, and the promise only keeps thresholds unchanged.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from offramp.bundle import (
    ActiveExit,
    Bundle,
    Exit,
    ExitPolicy,
    Head,
    InputRanges,
    Manifest,
    Profile,
    Promise,
    Segment,
    TensorSpec,
    write_bundle,
)
from offramp.bundle.bundle import RECORDS
from offramp.bundle.files import FileContent, dump
from offramp.bundle.graph_weights import WEIGHTS
from offramp.bundle.schema.inputs import INPUT_RANGES
from offramp.bundle.schema.manifest import Calibration, Source
from offramp.calibration.heads.cut_tensors import CutTensor
from offramp.compiler.cuts.cuts import find_cuts
from offramp.compiler.cuts.exit_placement import choose_candidates
from offramp.compiler.cuts.slicing import SegmentModel, split
from offramp.compiler.frontend.model import read_model
from offramp.compiler.graphs.source_model import SourceModel
from offramp.compiler.graphs.weights import pack_weights

REPLAY = "replay"
"""Input [batch, exits], float32, with the confidences of exits, if these are replayed."""
_BARELY = 1e-30
"""Weight of an exit's own confidence next to the replayed one: no effect in any precision, but an
optimiser cannot remove it."""

_SAMPLES = 2000
"""Number of made-up records."""
_PROMISE = Promise(
    max_disagreement=0.01,
    confidence_level=0.99,
    certify_samples=_SAMPLES // 2,
    certify_errors=0,
    p_value=0.99 ** (_SAMPLES // 2),
    predicted_savings=0.0,
)


class Pieces(Protocol):
    """A model in pieces; ``compiler.slicing.Sliced`` is one."""

    @property
    def model(self) -> SourceModel:
        """The model before it was cut into pieces."""
        ...

    @property
    def cuts(self) -> Sequence[CutTensor]:
        """Tensors between the segments."""
        ...

    @property
    def segments(self) -> Sequence[SegmentModel]:
        """Segments of the model, one more than cuts."""
        ...

    @property
    def graphs(self) -> Sequence[bytes]:
        """Serialised graphs of the segments."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CutModel:
    """A model cut at some tensors: :class:`Pieces`."""

    model: SourceModel
    cuts: tuple[CutTensor, ...]
    segments: tuple[SegmentModel, ...]
    graphs: tuple[bytes, ...]

    @classmethod
    def at(cls, path: Path, tensors: Sequence[str]) -> CutModel:
        """Read a model, and cut it as the compiler does.

        Args:
            path: An ONNX file.
            tensors: Names of cut points.

        Raises:
            CompileError: The model cannot be read, or a tensor is not a cut point.
        """
        model = read_model(path, simplify=False)
        points = choose_candidates(find_cuts(model), exits=list(tensors))
        segments = split(model, points)
        return cls(
            model=model,
            cuts=tuple(point.head_input() for point in points),
            segments=segments,
            graphs=tuple(segment.proto.SerializeToString() for segment in segments),
        )


def plain_bundle(
    pieces: Pieces,
    path: Path,
    samples: Mapping[str, NDArray[Any]],
    *,
    exits_after: Sequence[int],
    active: Sequence[ActiveExit],
    replayed: bool = False,
    ranges: InputRanges | None = None,
) -> Bundle:
    """Write a bundle whose exits average over tokens or pixels, then apply one linear layer.

    Args:
        pieces: The model.
        path: Where to; its stem is the bundle's name.
        samples: Some inputs of the model, for their shapes.
        exits_after: Segments that get an exit.
        active: The policy.
        replayed: Whether confidences are read from the additional input :data:`REPLAY`.
        ranges: Ranges of inputs that exits may answer; by default exits may answer any input.
    """
    exits = tuple(
        _exit(pieces.cuts[after], index, after, replayed=replayed)
        for index, after in enumerate(exits_after)
    )
    source, inputs = pieces.model.proto, pieces.model.inputs
    shapes = {name: array.shape[1:] for name, array in samples.items()}
    if replayed:
        source = _with_replay(source, len(exits))
        inputs = (*inputs, TensorSpec(name=REPLAY, dtype="float32", shape=("batch", len(exits))))
        shapes[REPLAY] = (len(exits),)
    return _write(
        pieces,
        path,
        source=source,
        inputs=inputs,
        shapes=shapes,
        exits={e: _head(pieces, e, len(exits)) for e in exits},
        active=active,
        ranges=ranges,
    )


def bundle_of(
    pieces: Pieces,
    path: Path,
    samples: Mapping[str, NDArray[Any]],
    *,
    exits: Mapping[Exit, bytes],
    active: Sequence[ActiveExit],
) -> Bundle:
    """Write a bundle with exits that were built elsewhere.

    Args:
        pieces: The model.
        path: Where to; its stem is the bundle's name.
        samples: Some inputs of the model, for their shapes.
        exits: The exits in their order, and their graphs.
        active: The policy.
    """
    return _write(
        pieces,
        path,
        source=pieces.model.proto,
        inputs=pieces.model.inputs,
        shapes={name: array.shape[1:] for name, array in samples.items()},
        exits=exits,
        active=active,
        ranges=None,
    )


def _write(
    pieces: Pieces,
    path: Path,
    *,
    source: onnx.ModelProto,
    inputs: tuple[TensorSpec, ...],
    shapes: dict[str, tuple[int, ...]],
    exits: Mapping[Exit, bytes],
    active: Sequence[ActiveExit],
    ranges: InputRanges | None,
) -> Bundle:
    segments = tuple(segment.described() for segment in pieces.segments)
    graphs = {s.file: g for s, g in zip(segments, pieces.graphs, strict=True)}
    graphs |= {e.file: graph for e, graph in exits.items()}
    graphs["source.onnx"] = source.SerializeToString()
    packed = pack_weights(graphs, None)
    files: dict[str, FileContent] = dict(packed.graphs)
    if packed.sizes.file_bytes:
        files[WEIGHTS] = packed.pieces()
    files["profiles/cpu.json"] = dump(_made_up_profile(segments, len(exits)))
    if ranges is not None:
        files[INPUT_RANGES] = dump(ranges)
    files[RECORDS] = _made_up_records(len(exits), pieces.model.answer.classes)
    manifest = Manifest(
        name=path.stem,
        created_utc="2026-01-02T03:04:05+00:00",
        tools={},
        source=Source(
            file="source.onnx", original_name="m.onnx", original_sha256="0" * 64, opset=17
        ),
        inputs=inputs,
        outputs=pieces.model.outputs,
        answer=pieces.model.answer,
        segments=segments,
        exits=tuple(exits),
        calibration=Calibration(
            data_sha256="1" * 64,
            train_samples=1,
            tune_samples=1,
            certify_samples=1,
            sample_shapes=shapes,
            reference_batch_size=8,
        ),
        verified_tolerance=1e-5,
    )
    policy = ExitPolicy(version=1, active=tuple(active), promise=_PROMISE)
    return write_bundle(path, manifest, policy, files)


def _made_up_profile(segments: Sequence[Segment], exits: int) -> Profile:
    """Return a profile in which only work takes time, one millisecond per sample."""
    sizes = (1, 2, 4, 8, 16, 32, 64)
    source = tuple(float(size) for size in sizes)
    return Profile(
        device="made up",
        threads=1,
        batch_sizes=sizes,
        source_ms=source,
        segments_ms=tuple(tuple(s.flops_share * ms for ms in source) for s in segments),
        exits_ms=tuple(tuple(0.01 * ms for ms in source) for _ in range(exits)),
        stages_ms=((0.01,) * len(sizes),) * exits,
    )


def _made_up_records(exits: int, classes: int) -> bytes:
    """Return records in which every exit always agrees."""
    rng = np.random.default_rng(0)
    final = rng.integers(0, classes, _SAMPLES, dtype=np.int32)
    stream = io.BytesIO()
    np.savez(
        stream,
        confidence=rng.random((exits, _SAMPLES), np.float32),
        prediction=np.tile(final, (exits, 1)),
        final_prediction=final,
        final_confidence=rng.random(_SAMPLES, np.float32),
        split=np.repeat(np.array([1, 2], np.uint8), _SAMPLES // 2),
    )
    return stream.getvalue()


def _with_replay(source: onnx.ModelProto, exits: int) -> onnx.ModelProto:
    """Return the same model with an additional input that only exits read."""
    model = onnx.ModelProto.FromString(source.SerializeToString())
    model.graph.input.append(_info(REPLAY, ["batch", exits]))
    return model


def _exit(cut: CutTensor, index: int, after: int, *, replayed: bool) -> Exit:
    made = Exit(
        index=index,
        after_segment=after,
        file=f"exits/{index:02d}.onnx",
        inputs=(cut.name,),
        output=f"exit{index}/answer",
        confidence=f"exit{index}/confidence",
        head=Head(kind="mean"),
        agreement=0.5,
    )
    return replace(made, inputs=(cut.name, REPLAY)) if replayed else made


def _head(pieces: Pieces, exit_: Exit, exits: int) -> bytes:
    """Return an exit: mean over tokens or pixels, a linear layer, and the largest probability."""
    cut, answer = pieces.cuts[exit_.after_segment], pieces.model.answer
    width = cut.width
    assert width is not None
    pooled_axes = [axis for axis in range(1, cut.rank) if axis != cut.channel_axis]
    stem, pooled = f"exit{exit_.index}", cut.name
    weight = np.random.default_rng(exit_.index).standard_normal((width, answer.classes))
    weights = {f"{stem}/weight": weight.astype(np.float32)}
    replayed = REPLAY in exit_.inputs
    nodes = []
    if pooled_axes:
        pooled = f"{stem}/pooled"
        nodes.append(
            helper.make_node("ReduceMean", [cut.name], [pooled], axes=pooled_axes, keepdims=0)
        )
    logits = f"{stem}/logits" if answer.form == "probabilities" else exit_.output
    chances = exit_.output if answer.form == "probabilities" else f"{stem}/chances"
    sure = f"{stem}/sure" if replayed else exit_.confidence
    nodes += [
        helper.make_node("MatMul", [pooled, f"{stem}/weight"], [logits]),
        helper.make_node("Softmax", [logits], [chances], axis=-1),
        helper.make_node("ReduceMax", [chances], [sure], axes=[1], keepdims=0),
    ]
    inputs = [_info(cut.name, cut.shape)]
    if replayed:
        inputs.append(_info(REPLAY, ["batch", exits]))
        weights[f"{stem}/barely"] = np.array(_BARELY, np.float32)
        weights[f"{stem}/number"] = np.array(exit_.index, np.int64)
        nodes += [
            helper.make_node("Mul", [sure, f"{stem}/barely"], [f"{stem}/nothing"]),
            helper.make_node("Gather", [REPLAY, f"{stem}/number"], [f"{stem}/replayed"], axis=1),
            helper.make_node("Add", [f"{stem}/replayed", f"{stem}/nothing"], [exit_.confidence]),
        ]
    graph = helper.make_graph(
        nodes,
        stem,
        inputs,
        [_info(exit_.output, ["batch", answer.classes]), _info(exit_.confidence, ["batch"])],
        initializer=[numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    opset = pieces.model.proto.opset_import[0].version
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    made.ir_version = pieces.model.proto.ir_version
    onnx.checker.check_model(made)
    content: bytes = made.SerializeToString()
    return content


def _info(name: str, shape: Sequence[int | str]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
