"""All graphs of a generating model from its export: the table of contents of this package.

A decoder is one file, an encoder-decoder a folder with three, as optimum writes them. The export is
read (:mod:`.decoder_export`), cut between layers (:mod:`.decoder_cut`), and its parts are extracted
as graphs (:mod:`.extraction`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import onnx

from offramp.compiler.common.errors import ModelError
from offramp.compiler.graphs.graph import Operator, serialised
from offramp.generation.bundle.tensor_names import (
    KINDS,
    LOGITS,
    NEXT_STATE,
    PREVIOUS_STATE,
    STATE,
    new_name,
)
from offramp.generation.bundle.text_model import (
    SkippedLayers,
    TextCriterion,
    TextModel,
    TextStage,
)
from offramp.generation.graphs.decoder_cut import DecoderCut
from offramp.generation.graphs.decoder_export import (
    HOW_TO_EXPORT,
    DecoderExport,
    decoder_of,
    load_graph,
)
from offramp.generation.graphs.encoder_graph import encoder_graph
from offramp.generation.graphs.extraction import extract
from offramp.generation.graphs.heads import reads_previous, state_similarity, with_answer
from offramp.generation.graphs.padding_check import takes_padding, takes_several
from offramp.generation.graphs.stacking import return_input, stacked

ENCODER_FILE: Final = "encoder_model.onnx"
FIRST_FILE: Final = "decoder_model.onnx"
"""File of the decoder without a past, which computes keys and values from the encoder's output."""
DECODER_FILE: Final = "decoder_with_past_model.onnx"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextExport:
    """A model that generates text, as it was exported."""

    decoder: DecoderExport
    encoder: onnx.ModelProto | None
    """Graph from a prompt to the encoder's keys and values for all layers; ``None`` without an
    encoder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextGraphs:
    """A generating model in stages, with its graphs."""

    model: TextModel
    graphs: Mapping[str, bytes]
    """Serialised graphs, by the file names in ``model``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextExit:
    """An exit to build into a decoder, with its graphs."""

    layer: int
    """Number of layers before the exit."""
    threshold: float
    """Lowest confidence at which a token leaves."""
    adapter: onnx.ModelProto | None = None
    """Graph from ``state`` to ``next_state``, float32 [n, tokens, width]; ``None`` for no
    change.
    """
    head: onnx.ModelProto | None = None
    """Graph from ``state`` float32 [n, 1, width] to ``answer`` int64 [n] and ``confidence`` float32
    [n]. It replaces adapter and shared head; ``None`` if the exit uses the adapter and the shared
    head."""
    judge: onnx.ModelProto | None = None
    """Graph from ``state``, and ``previous_state`` if needed, to ``confidence`` float32 [n];
    ``None`` for the criterion's default."""


def read_export(path: Path) -> TextExport:
    """Read a decoder's file, or the folder of an encoder-decoder; ModelError for anything else."""
    if not path.is_dir():
        decoder = decoder_of(load_graph(path), path.name)
        if decoder.encodes:
            raise ModelError(
                f"{path} is the decoder of an encoder-decoder; pass the folder with "
                f"{ENCODER_FILE}, {FIRST_FILE} and {DECODER_FILE}"
            )
        return TextExport(decoder=decoder, encoder=None)
    missing = [n for n in (ENCODER_FILE, FIRST_FILE, DECODER_FILE) if not (path / n).is_file()]
    if missing:
        raise ModelError(
            f"{path} has no {missing[0]}; expected {ENCODER_FILE}, {FIRST_FILE} and "
            f"{DECODER_FILE}, or the file of a decoder; {HOW_TO_EXPORT}"
        )
    decoder = decoder_of(load_graph(path / DECODER_FILE), DECODER_FILE)
    if not decoder.encodes:
        raise ModelError(
            f"{path / DECODER_FILE} has no past_key_values.0.encoder.key; {HOW_TO_EXPORT}"
        )
    first = load_graph(path / FIRST_FILE)
    encoder = encoder_graph(load_graph(path / ENCODER_FILE), first, decoder)
    return TextExport(decoder=decoder, encoder=encoder)


def cut_export(
    export: TextExport,
    exits: Sequence[TextExit],
    *,
    criterion: TextCriterion = "softmax margin",
    skipped: SkippedLayers = "propagation",
    start_token: int | None = None,
    stop_tokens: Sequence[int] = (),
) -> TextGraphs:
    """Return the graphs of a generating model with some exits, in the order of their layers.

    Raise ModelError if the decoder cannot be cut, if an exit is not between layers or lacks the
    classifier that the criterion needs, or if an encoder-decoder has no ``start_token``.
    """
    decoder = export.decoder
    count = len(decoder.layers)
    layers = [exit_.layer for exit_ in exits]
    if layers != sorted(set(layers)) or any(not 0 < layer < count for layer in layers):
        raise ModelError(
            f"exits are wanted after layers {layers}, expected increasing numbers from 1 to "
            f"{count - 1}: the model has {count} layers"
        )
    if export.encoder is not None and start_token is None:
        raise ModelError(
            "the decoder of an encoder-decoder begins with a start token: pass its number "
            "(decoder_start_token_id in config.json)"
        )
    cut = DecoderCut(decoder)
    width = decoder.sizes.shapes[cut.borders[0]][2]
    assert isinstance(width, int), "states have a fixed width"
    made = {"head.onnx": head_graph(cut, criterion)}
    stages: list[TextStage] = []
    for index, exit_ in enumerate([*exits, None]):
        start, end = layers[index - 1] if index else 0, exit_.layer if exit_ else count
        stage = TextStage(end=end, file=f"stages/{index:02d}.onnx")
        own = {} if exit_ is None else _own_graphs(exit_, criterion, width)
        compares = "judge" in own and reads_previous(own["judge"])
        made[stage.file] = segment_graph(cut, start, end, previous=compares)
        if exit_ is not None:
            own["propagation"] = propagation_graph(cut, end, count)
            files: dict[str, Any] = {kind: f"{kind}/{index:02d}.onnx" for kind in own}
            stage = replace(stage, threshold=exit_.threshold, **files)
            made |= {files[kind]: graph for kind, graph in own.items()}
        stages.append(stage)
    if export.encoder is not None:
        made["encoder.onnx"] = export.encoder
    model = TextModel(
        kind="decoder" if export.encoder is None else "encoder-decoder",
        layers=tuple(layer.cache for layer in decoder.layers),
        width=width,
        vocabulary=decoder.vocabulary,
        ragged=takes_padding(decoder),
        several=takes_several(decoder),
        criterion=criterion,
        skipped=skipped,
        stages=tuple(stages),
        head="head.onnx",
        encoder="" if export.encoder is None else "encoder.onnx",
        start_token=start_token if export.encoder is not None else None,
        stop_tokens=tuple(stop_tokens),
    )
    return TextGraphs(model=model, graphs={name: serialised(g) for name, g in made.items()})


def _own_graphs(
    exit_: TextExit, criterion: TextCriterion, width: int
) -> dict[str, onnx.ModelProto]:
    """Return one exit's graphs; keys are the :class:`.TextStage` fields for the graphs' files."""
    judge = exit_.judge
    if judge is None and criterion == "state similarity":
        judge = state_similarity(width)
    if judge is None and criterion == "learned classifier":
        raise ModelError(
            f"the exit after layer {exit_.layer} has no classifier, and the criterion is "
            f"{criterion!r}: pass its graph, or choose another criterion"
        )
    own = {"adapter": exit_.adapter, "head": exit_.head, "judge": judge}
    return {kind: graph for kind, graph in own.items() if graph is not None}


def segment_graph(
    cut: DecoderCut, start: int, end: int, *, previous: bool = False
) -> onnx.ModelProto:
    """Extract layers ``start`` to ``end``: from state or tokens to next state, new keys and values.

    The graph also reads masks, positions and the caches of its own layers. With ``previous`` it
    also returns the state before its last layer. If it has only one layer, this is its own input
    (for layer 0, the embedding).
    """
    export, borders = cut.export, cut.borders
    own = export.layers[start:end]
    outputs = {borders[end]: NEXT_STATE}
    for number, layer in enumerate(own, start):
        outputs |= {layer.new[kind]: new_name(number, kind) for kind in KINDS}
    starts = [borders[start]] if start else []
    enters = borders[end - 1] in starts
    if previous and not enters:
        outputs[borders[end - 1]] = PREVIOUS_STATE
    caches = [tensor for layer in own for tensor in layer.inputs]
    graph = extract(
        cut,
        cut.needed(outputs, stop=starts),
        starts=starts or [export.ids],
        inputs=[export.mask, export.positions, export.source_mask, *caches],
        outputs=outputs,
        renamed={**export.own_names, **dict.fromkeys(starts, STATE)},
        name=f"layers {start} to {end}",
    )
    if previous and enters:
        return_input(graph, STATE, PREVIOUS_STATE)
    return stacked(graph, _caches(cut, start, end))


def propagation_graph(cut: DecoderCut, start: int, end: int) -> onnx.ModelProto:
    """Extract the graph from one state to the keys and values of layers ``start`` to ``end``.

    Each layer reads the state as if the layers before it had not changed it (CALM 3.3).
    """
    export, borders = cut.export, cut.borders
    outputs: dict[str, str] = {}
    operators: dict[int, Operator] = {}
    for number in range(start, end):
        new = export.layers[number].new
        outputs |= {new[kind]: new_name(number, kind) for kind in KINDS}
        operators |= {op.index: op for op in cut.needed(new.values(), stop=[borders[number]])}
    starts = borders[start:end]
    graph = extract(
        cut,
        [operators[index] for index in sorted(operators)],
        starts=starts,
        inputs=[export.mask, export.positions, export.source_mask],
        outputs=outputs,
        renamed={**export.own_names, **dict.fromkeys(starts, STATE)},
        name=f"keys and values of layers {start} to {end}",
    )
    return stacked(graph, _caches(cut, start, end))


def _caches(cut: DecoderCut, start: int, end: int) -> dict[str, tuple[int, int]]:
    """Return number of heads and size of some layers' new keys and values, by name, in order."""
    caches = {n: cut.export.layers[n].cache for n in range(start, end)}
    return {
        new_name(n, kind): (cache.heads, cache.size)
        for n, cache in caches.items()
        for kind in KINDS
    }


def logits_graph(cut: DecoderCut) -> onnx.ModelProto:
    """Extract the final norm and the LM head: state to logits float32 [n, tokens, vocabulary]."""
    export, last = cut.export, cut.borders[-1]
    return extract(
        cut,
        cut.needed([export.logits], stop=[last]),
        starts=[last],
        inputs=[],
        outputs={export.logits: LOGITS},
        renamed={last: STATE},
        name="head",
    )


def head_graph(cut: DecoderCut, criterion: TextCriterion) -> onnx.ModelProto:
    """Extract the head; it returns token and confidence instead of logits."""
    return with_answer(logits_graph(cut), criterion)
