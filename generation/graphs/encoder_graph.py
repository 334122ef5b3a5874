"""One graph from a prompt to the keys and values that decoder layers compute from it."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import inliner, numpy_helper

from offramp.compiler.common.errors import ModelError
from offramp.compiler.graphs.graph import default_opset, hoisted, rename_graph
from offramp.generation.bundle.tensor_names import (
    IDS,
    KINDS,
    MASK,
    SOURCE_MASK,
    cross_name,
    size_name,
)
from offramp.generation.graphs.decoder_cut import DecoderCut
from offramp.generation.graphs.decoder_export import (
    HOW_TO_EXPORT,
    SOURCE_STATES,
    DecoderExport,
)
from offramp.generation.graphs.extraction import extract
from offramp.generation.graphs.sizes import measure
from offramp.generation.graphs.stacking import stacked

_STATES = ("last_hidden_state", SOURCE_STATES)


def encoder_graph(
    encoder: onnx.ModelProto, first: onnx.ModelProto, decoder: DecoderExport
) -> onnx.ModelProto:
    """Join the encoder with the projections of its output in each layer of the decoder.

    ``first`` is the decoder without a past; its outputs ``present.N.encoder.key`` are the
    projections. The graph reads ``input_ids`` and ``attention_mask`` int64 [n, source]. All keys
    and values of one size are one output. Raise ModelError if a name is missing.
    """
    encoder = hoisted(inliner.inline_local_functions(encoder) if encoder.functions else encoder)
    names = [info.name for info in encoder.graph.input]
    if IDS not in names or not set(names) <= {IDS, MASK}:
        raise ModelError(
            f"the encoder has inputs {', '.join(names)}, expected {IDS} and {MASK}; {HOW_TO_EXPORT}"
        )
    given = next((o.name for o in encoder.graph.output if o.name in _STATES), None)
    if given is None:
        told = ", ".join(o.name for o in encoder.graph.output)
        raise ModelError(
            f"the encoder has no output {_STATES[0]!r}, outputs are {told}; {HOW_TO_EXPORT}"
        )
    crossed = _projections(first, decoder)
    if default_opset(encoder) != default_opset(crossed):
        raise ModelError(
            f"encoder and decoder have opsets {default_opset(encoder)} and "
            f"{default_opset(crossed)}; export both with the same"
        )
    kept = {IDS: IDS, MASK: MASK, given: SOURCE_STATES}
    rename_graph(encoder.graph, lambda name: kept.get(name, f"encoder/{name}"))
    joined = crossed.graph
    nodes = [*encoder.graph.node, *joined.node]
    del joined.node[:]
    joined.node.extend(nodes)
    joined.initializer.extend(encoder.graph.initializer)
    del joined.input[:]
    joined.input.extend(encoder.graph.input)
    # The decoder's own tokens matter here only for the shapes that are read from them.
    joined.initializer.append(numpy_helper.from_array(np.ones(1, np.int64), size_name("tokens")))
    masked = any(info.name == MASK for info in joined.input)
    # A projection may read the mask of the encoder's output, which is the prompt's mask.
    rename_graph(joined, lambda name: MASK if masked and name == SOURCE_MASK else name)
    sizes = {
        cross_name(number, kind): (layer.cache.cross_heads, layer.cache.cross_size)
        for number, layer in enumerate(decoder.layers)
        for kind in KINDS
    }
    return stacked(crossed, sizes)


def _projections(first: onnx.ModelProto, decoder: DecoderExport) -> onnx.ModelProto:
    """Extract the operators that compute keys and values from the encoder's output."""
    proto = hoisted(inliner.inline_local_functions(first) if first.functions else first)
    inputs = {info.name: info for info in proto.graph.input}
    ids = next((n for n in ("input_ids", "decoder_input_ids") if n in inputs), "")
    if SOURCE_STATES not in inputs or not ids:
        raise ModelError(
            f"the decoder without a past has inputs {', '.join(inputs)}, expected input_ids and "
            f"{SOURCE_STATES}; {HOW_TO_EXPORT}"
        )
    outputs = {}
    for number in range(len(decoder.layers)):
        for kind in KINDS:
            found = f"present.{number}.encoder.{kind}"
            if found not in {o.name for o in proto.graph.output}:
                raise ModelError(
                    f"the decoder without a past has no output {found!r}; {HOW_TO_EXPORT}"
                )
            outputs[found] = cross_name(number, kind)
    for name, info in inputs.items():
        sizes = ("batch", "tokens" if name in (ids, "decoder_attention_mask") else "source")
        for dim, size in zip(info.type.tensor_type.shape.dim, sizes, strict=False):
            dim.dim_param = size
    whole = DecoderExport(
        proto=proto,
        layers=(),
        ids=ids,
        mask="",
        positions="",
        source_mask=decoder.source_mask if decoder.source_mask in inputs else "",
        logits="",
        sizes=measure(proto),
    )
    cut = DecoderCut(whole)
    return extract(
        cut,
        cut.needed(outputs, stop=[SOURCE_STATES]),
        starts=[SOURCE_STATES],
        inputs=[whole.source_mask],
        outputs=outputs,
        renamed={whole.source_mask: SOURCE_MASK},
        name="encoder",
    )
