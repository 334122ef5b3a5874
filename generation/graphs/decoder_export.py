"""A decoder as exporters write it, with its caches, masks and positions.

Inputs are identified by the names that transformers and optimum use. The keys and values that a
step adds are found in the graph, so output names do not matter: each layer concatenates them to its
past.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final, Literal, TypeAlias

import onnx
from onnx import inliner

from offramp.compiler.common.errors import ModelError
from offramp.compiler.frontend.decoder_cache import check_no_fused_cache
from offramp.compiler.graphs.graph import Dataflow, Operator, hoisted, integer, is_standard
from offramp.generation.bundle.tensor_names import (
    IDS,
    KINDS,
    MASK,
    POSITIONS,
    SOURCE_MASK,
    CacheKind,
    cross_name,
    past_name,
)
from offramp.generation.bundle.text_model import LayerCache
from offramp.generation.graphs.sizes import TensorSizes, measure
from offramp.generation.graphs.tied_weights import tie

SOURCE_STATES: Final = "encoder_hidden_states"
"""Input with the encoder's output, [batch, source, width], if the decoder reads this output."""
_SELF_MASKS: Final = ("decoder_attention_mask", "attention_mask")
_SELF_POSITIONS: Final = ("decoder_position_ids", "position_ids")
_CACHES: Final = (
    re.compile(r"past_key_values[._](?P<layer>\d+)[._](?P<side>encoder[._]|decoder[._])?"
               r"(?P<kind>key|value)"),
    re.compile(r"past_key_values[._](?P<kind>key|value)_cache[._](?P<layer>\d+)"),
    re.compile(r"past_(?P<kind>key|value)_values[._](?P<layer>\d+)"),
)  # fmt: skip
"""Patterns of input names of keys or values: optimum's, and those of torch's exporter for
caches.
"""
_SIDE: Final = {"encoder": "encoder"}
HOW_TO_EXPORT: Final = (
    "export it with past keys and values, as optimum-cli export onnx --task "
    "text-generation-with-past (or text2text-generation-with-past) --no-post-process does: inputs "
    "input_ids, attention_mask, position_ids, past_key_values.N.key and .value, output logits"
)

Side: TypeAlias = Literal["decoder", "encoder"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTensors:
    """Tensors of one decoder layer's cache, by their names in the export."""

    past: Mapping[CacheKind, str]
    """Inputs with the keys and values of earlier tokens."""
    new: Mapping[CacheKind, str]
    """Keys and values of the new tokens of a step, which are concatenated to ``past``."""
    cross: Mapping[CacheKind, str]
    """Inputs with the keys and values of the encoder's output; empty without an encoder."""
    cache: LayerCache

    @property
    def inputs(self) -> tuple[str, ...]:
        """All inputs of the layer's caches."""
        return (*self.past.values(), *self.cross.values())


@dataclass(frozen=True, kw_only=True)  # without slots, for what is cached
class DecoderExport:
    """A decoder with past keys and values, or the decoder of an encoder-decoder."""

    proto: onnx.ModelProto
    """Model with constants as initializers; input sizes have the symbols of :mod:`.sizes`."""
    layers: tuple[LayerTensors, ...]
    ids: str
    mask: str
    """Name of the mask input; empty without a mask. ``positions`` and ``source_mask`` are alike."""
    positions: str
    source_mask: str
    logits: str
    sizes: TensorSizes

    @cached_property
    def flow(self) -> Dataflow:
        """The operators and tensors of ``proto``, as a data-flow graph."""
        return Dataflow(self.proto.graph)

    @property
    def encodes(self) -> bool:
        """True if the decoder belongs to an encoder-decoder."""
        return any(layer.cross for layer in self.layers)

    @property
    def vocabulary(self) -> int:
        """Number of tokens in the vocabulary."""
        return _fixed(self.sizes, self.logits, 2, "the vocabulary")

    @property
    def own_names(self) -> dict[str, str]:
        """Names of the inputs in our graphs, by their names in the export."""
        named = {self.ids: IDS, self.mask: MASK, self.positions: POSITIONS}
        named[self.source_mask] = SOURCE_MASK
        for number, layer in enumerate(self.layers):
            named |= {name: past_name(number, kind) for kind, name in layer.past.items()}
            named |= {name: cross_name(number, kind) for kind, name in layer.cross.items()}
        named.pop("", None)
        return named


def read_decoder(path: Path) -> DecoderExport:
    """Read a decoder's file; ModelError if it is not a decoder with past keys and values."""
    return decoder_of(load_graph(path), path.name)


def load_graph(path: Path) -> onnx.ModelProto:
    """Load an ONNX file with its weights; ModelError if it cannot be read."""
    try:
        return onnx.load(path)
    except Exception as error:  # onnx and protobuf have classes of their own
        reason = " ".join(str(error).split())
        raise ModelError(f"{path} cannot be read: {reason}; expected an ONNX file") from error


def decoder_of(source: onnx.ModelProto, name: str) -> DecoderExport:
    """Find the tensors of a decoder's graph; ``name`` is its file's name, for messages."""
    check_no_fused_cache(source)
    proto = hoisted(inliner.inline_local_functions(source) if source.functions else source)
    tie(proto)
    inputs = {info.name: info for info in proto.graph.input}
    caches = _caches(inputs, name)
    crosses = any(side == "encoder" for _, side, _ in caches)
    ids = _required(inputs, ("input_ids", "decoder_input_ids"), name)
    mask = _first(inputs, _SELF_MASKS[:1] if crosses else _SELF_MASKS)
    source_mask = _first(inputs, ("encoder_attention_mask", *_SELF_MASKS[1:])) if crosses else ""
    positions = _first(inputs, _SELF_POSITIONS)
    known = {ids, mask, positions, source_mask, SOURCE_STATES, *caches.values()}
    if crosses and not source_mask:
        raise ModelError(f"{name}: no input 'encoder_attention_mask'; {HOW_TO_EXPORT}")
    foreign = [n for n in inputs if n not in known]
    if foreign:
        raise ModelError(
            f"{name}: input {foreign[0]!r} is not a known input of a decoder; {HOW_TO_EXPORT}"
        )
    _name_sizes(inputs, caches, ids=ids, mask=mask, positions=positions, source_mask=source_mask)
    flow = Dataflow(proto.graph)
    logits = _logits(flow, name)
    sizes = measure(proto)
    layers = _layers(caches, flow, inputs, name, crosses=crosses)
    return DecoderExport(
        proto=proto,
        layers=layers,
        ids=ids,
        mask=mask,
        positions=positions,
        source_mask=source_mask,
        logits=logits,
        sizes=sizes,
    )


_Caches: TypeAlias = "dict[tuple[int, Side, CacheKind], str]"


def _caches(inputs: Sequence[str] | Mapping[str, object], name: str) -> _Caches:
    """Find the inputs with keys and values by layer, side and kind; ModelError if incomplete."""
    found: _Caches = {}
    for given in inputs:
        for pattern in _CACHES:
            if (match := pattern.fullmatch(given)) is not None:
                told = match.groupdict()
                side: Side = "encoder" if (told.get("side") or "").startswith("enc") else "decoder"
                kind: CacheKind = "key" if told["kind"] == "key" else "value"
                found[int(told["layer"]), side, kind] = given
    if not found:
        raise ModelError(
            f"{name}: no input past_key_values.0.key, inputs are {', '.join(inputs)}; "
            f"{HOW_TO_EXPORT}"
        )
    sides = sorted({side for _, side, _ in found})
    for number in range(max(layer for layer, _, _ in found) + 1):
        for side in sides:
            for kind in KINDS:
                if (number, side, kind) not in found:
                    told_side = f".{side}" if len(sides) > 1 else ""
                    raise ModelError(
                        f"{name}: no input past_key_values.{number}{told_side}.{kind}, though "
                        f"other layers have theirs; {HOW_TO_EXPORT}"
                    )
    return found


def _layers(
    caches: _Caches,
    flow: Dataflow,
    inputs: Mapping[str, onnx.ValueInfoProto],
    name: str,
    *,
    crosses: bool,
) -> tuple[LayerTensors, ...]:
    count = max(layer for layer, _, _ in caches) + 1
    layers = []
    for number in range(count):
        past = {kind: caches[number, "decoder", kind] for kind in KINDS}
        cross = {kind: caches[number, "encoder", kind] for kind in KINDS} if crosses else {}
        heads, size = _cache_sizes(inputs, past, name)
        cross_heads, cross_size = _cache_sizes(inputs, cross, name) if cross else (0, 0)
        layers.append(
            LayerTensors(
                past=past,
                new={kind: _joined(flow, tensor, name) for kind, tensor in past.items()},
                cross=cross,
                cache=LayerCache(
                    heads=heads, size=size, cross_heads=cross_heads, cross_size=cross_size
                ),
            )
        )
    return tuple(layers)


def _cache_sizes(
    inputs: Mapping[str, onnx.ValueInfoProto], tensors: Mapping[CacheKind, str], name: str
) -> tuple[int, int]:
    """Return the number of heads and the size of a layer's keys; its values must have the same."""
    told = set()
    for tensor in tensors.values():
        kind = inputs[tensor].type.tensor_type
        dims = [d.dim_value if d.HasField("dim_value") else None for d in kind.shape.dim]
        if len(dims) != 4 or not dims[1] or not dims[3] or kind.elem_type != onnx.TensorProto.FLOAT:
            raise ModelError(
                f"{name}: input {tensor!r} has shape {dims}, expected float32 "
                "[batch, heads, past, size] with fixed heads and size; " + HOW_TO_EXPORT
            )
        told.add((dims[1], dims[3]))
    if len(told) != 1:
        raise ModelError(f"{name}: keys and values of {', '.join(tensors.values())} differ in size")
    return told.pop()


def _joined(flow: Dataflow, past: str, name: str) -> str:
    """Find the keys or values of the new tokens that a layer concatenates to its past."""
    for op in _readers(flow, past):
        axis = integer(op.proto, "axis")
        if op.kind == "Concat" and len(op.proto.input) == 2 and axis in (2, -2):
            return next(t for t in op.proto.input if t not in _same(flow, past))
    raise ModelError(
        f"{name}: input {past!r} is not joined with the keys or values of new tokens by a Concat "
        "along its third axis; caches written in place or of fixed length are not "
        "supported; " + HOW_TO_EXPORT
    )


def _same(flow: Dataflow, tensor: str) -> Iterator[str]:
    """Yield a tensor and the outputs of operators that copy it unchanged."""
    yield tensor
    for op in flow.consumers.get(tensor, ()):
        if op.kind == "Identity" or (op.kind == "Concat" and len(op.proto.input) == 1):
            yield from _same(flow, op.writes[0])


def _readers(flow: Dataflow, tensor: str) -> Iterator[Operator]:
    for name in _same(flow, tensor):
        yield from (op for op in flow.consumers.get(name, ()) if is_standard(op.proto))


def _name_sizes(
    inputs: Mapping[str, onnx.ValueInfoProto],
    caches: _Caches,
    *,
    ids: str,
    mask: str,
    positions: str,
    source_mask: str,
) -> None:
    """Rename the sizes of inputs to the names used in all graphs, in place."""
    named = {
        ids: ("batch", "tokens"),
        positions: ("batch", "tokens"),
        mask: ("batch", "total"),
        source_mask: ("batch", "source"),
        SOURCE_STATES: ("batch", "source", None),
    }
    for (_, side, _), tensor in caches.items():
        named[tensor] = ("batch", None, "source" if side == "encoder" else "past", None)
    for tensor, info in inputs.items():
        for dim, size in zip(info.type.tensor_type.shape.dim, named[tensor], strict=False):
            # Some exporters fix the number of tokens per step to 1; that size is kept.
            if size is not None and not (size == "tokens" and dim.HasField("dim_value")):
                dim.dim_param = size


def _logits(flow: Dataflow, name: str) -> str:
    if "logits" not in flow.outputs:
        raise ModelError(
            f"{name}: no output 'logits', outputs are {', '.join(flow.outputs)}; {HOW_TO_EXPORT}"
        )
    return "logits"


def _first(inputs: Mapping[str, object], names: Sequence[str]) -> str:
    return next((name for name in names if name in inputs), "")


def _required(inputs: Mapping[str, object], names: Sequence[str], file: str) -> str:
    found = _first(inputs, names)
    if not found:
        raise ModelError(
            f"{file}: no input {names[0]!r}, inputs are {', '.join(inputs)}; {HOW_TO_EXPORT}"
        )
    return found


def _fixed(sizes: TensorSizes, tensor: str, axis: int, what: str) -> int:
    found = sizes.of(tensor)
    size = None if found is None or len(found) <= axis else found[axis]
    if not isinstance(size, int):
        raise ModelError(f"{what} cannot be read from {tensor!r}, which has shape {found}")
    return size
