"""Tests whether a decoder can run on padded caches, and on several tokens per step.

Input names do not show this: a decoder with a mask but without positions may count padding as part
of its past, and a decoder exported for one token per step may lack the mask between new tokens.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray

from offramp.compiler.graphs.graph import copied
from offramp.compiler.graphs.runtime import GraphRunner
from offramp.generation.graphs.decoder_export import SOURCE_STATES, DecoderExport

_PAST, _PADDING, _SOURCE = 3, 2, 4
TOLERANCE: Final = 1e-3
"""Relative difference of logits caused by rounding; a wrong position causes a far larger one."""


def takes_padding(export: DecoderExport) -> bool:
    """Return True if a token's logits stay the same when its cache is padded, with a mask."""
    if not export.mask:
        return False
    feeds = _feeds(export, tokens=1)
    padded = dict(feeds)
    rng = np.random.default_rng(1)
    for layer in export.layers:
        for name in layer.past.values():
            heads, size = feeds[name].shape[1], feeds[name].shape[3]
            more = rng.standard_normal((1, heads, _PADDING, size)).astype(np.float32)
            padded[name] = np.concatenate([feeds[name], more], 2)
    counted = [1] * _PAST + [0] * _PADDING + [1]
    padded[export.mask] = np.array([counted], np.int64)
    return _same_logits(export, feeds, padded)


def takes_several(export: DecoderExport) -> bool:
    """Return True if two tokens in one step get the same logits as one after the other."""
    ids = next(i for i in export.proto.graph.input if i.name == export.ids)
    if ids.type.tensor_type.shape.dim[1].HasField("dim_value"):
        return False
    both = _feeds(export, tokens=2)
    runner = _runner(export)
    first = runner.run(both | _part(export, both, slice(0, 1), _PAST + 1))
    second = both | _part(export, both, slice(1, 2), _PAST + 2)
    for layer in export.layers:
        for kind, name in layer.past.items():
            second[name] = np.concatenate([both[name], first[layer.new[kind]]], 2)
    apart = runner.run(second)[export.logits]
    return _close(runner.run(both)[export.logits][:, 1:], apart)


def _part(
    export: DecoderExport, feeds: dict[str, NDArray[Any]], tokens: slice, total: int
) -> dict[str, NDArray[Any]]:
    part = {name: feeds[name][:, tokens] for name in (export.ids, export.positions) if name}
    return part | ({export.mask: feeds[export.mask][:, :total]} if export.mask else {})


def _same_logits(
    export: DecoderExport, one: dict[str, NDArray[Any]], other: dict[str, NDArray[Any]]
) -> bool:
    runner = _runner(export)
    return _close(runner.run(one)[export.logits], runner.run(other)[export.logits])


def _close(one: NDArray[Any], other: NDArray[Any]) -> bool:
    scale = np.abs(one).max()
    return bool(np.abs(one - other).max() <= TOLERANCE * scale)


def _runner(export: DecoderExport) -> GraphRunner:
    """Load the decoder with the new keys and values among its outputs."""
    proto = copied(export.proto)
    given = {o.name for o in proto.graph.output}
    wanted = [t for layer in export.layers for t in layer.new.values() if t not in given]
    for tensor in wanted:
        proto.graph.output.add(name=tensor).type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    return GraphRunner(proto)


def _feeds(export: DecoderExport, *, tokens: int) -> dict[str, NDArray[Any]]:
    """Return random inputs for one sequence: ``tokens`` new tokens, and a past."""
    rng = np.random.default_rng(0)
    feeds: dict[str, NDArray[Any]] = {
        export.ids: rng.integers(0, export.vocabulary, (1, tokens)),
        export.mask: np.ones((1, _PAST + tokens), np.int64),
        export.positions: np.arange(_PAST, _PAST + tokens)[None],
        export.source_mask: np.ones((1, _SOURCE), np.int64),
    }
    feeds.pop("", None)
    for info in export.proto.graph.input:
        if info.name == SOURCE_STATES:
            width = info.type.tensor_type.shape.dim[2].dim_value
            feeds[info.name] = rng.standard_normal((1, _SOURCE, width)).astype(np.float32)
    for layer in export.layers:
        sizes = dict.fromkeys(layer.past.values(), (layer.cache.heads, _PAST, layer.cache.size))
        cross = (layer.cache.cross_heads, _SOURCE, layer.cache.cross_size)
        sizes |= dict.fromkeys(layer.cross.values(), cross)
        for name, size in sizes.items():
            feeds[name] = rng.standard_normal((1, *size)).astype(np.float32)
    return feeds
