"""Graphs that are cut out of an export compute what it does; what cannot be cut is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from offramp.compiler.common.errors import ModelError
from offramp.generation.bundle.tensor_names import (
    ANSWER,
    CONFIDENCE,
    KINDS,
    LOGITS,
    NEXT_STATE,
    STATE,
    cross_name,
    new_name,
    past_name,
    stacked_name,
)
from offramp.generation.graphs.decoder_cut import DecoderCut
from offramp.generation.graphs.decoder_export import decoder_of
from offramp.generation.graphs.text_graphs import (
    TextExit,
    TextGraphs,
    cut_export,
    head_graph,
    logits_graph,
    propagation_graph,
    read_export,
    segment_graph,
)
from tests.text_models import (
    HEADS,
    LAYERS,
    START,
    VOCABULARY,
    WIDTH,
    backend_of,
    cut_at,
    exported,
    graphs_of,
    write,
)

SIZE = WIDTH // HEADS
PAST, TOKENS, SOURCE = 3, 2, 5
TOLERANCE = 1e-5
"""Float32 sums in another order, at states of some units."""


def run(model: onnx.ModelProto | bytes, feeds: dict[str, Any]) -> dict[str, NDArray[Any]]:
    content = model if isinstance(model, bytes) else model.SerializeToString()
    session = ort.InferenceSession(content, providers=["CPUExecutionProvider"])
    taken = {i.name: feeds[i.name] for i in session.get_inputs()}
    names = [o.name for o in session.get_outputs()]
    return dict(zip(names, session.run(None, taken), strict=True))


def parted(given: dict[str, NDArray[Any]], start: int, end: int) -> dict[str, NDArray[Any]]:
    """Outputs of layers, with keys and values of each."""
    rest = dict(given)
    names = [new_name(n, kind) for n in range(start, end) for kind in KINDS]
    return rest | dict(
        zip(names, np.split(rest.pop(stacked_name(HEADS, SIZE)), len(names)), strict=True)
    )


def feeds_of(*, encodes: bool) -> dict[str, Any]:
    """Inputs of a step under our names, and under those of exports."""
    rng = np.random.default_rng(0)
    feeds: dict[str, Any] = {
        "input_ids": rng.integers(0, VOCABULARY, (2, TOKENS)),
        "encoder_attention_mask": np.ones((2, SOURCE), np.int64),
    }
    for prefix in ("", "decoder_"):
        feeds[f"{prefix}attention_mask"] = np.ones((2, PAST + TOKENS), np.int64)
        feeds[f"{prefix}position_ids"] = np.arange(PAST, PAST + TOKENS).repeat(2).reshape(-1, 2).T
    for n in range(LAYERS):
        for kind in KINDS:
            past = rng.standard_normal((2, HEADS, PAST, SIZE)).astype(np.float32)
            cross = rng.standard_normal((2, HEADS, SOURCE, SIZE)).astype(np.float32)
            feeds |= {past_name(n, kind): past, cross_name(n, kind): cross}
            side = ".decoder" if encodes else ""
            feeds[f"past_key_values.{n}{side}.{kind}"] = past
            feeds[f"past_key_values.{n}.encoder.{kind}"] = cross
    return feeds


@pytest.fixture(
    params=[
        {},
        {"post_norm": True},
        {"mask": False, "positions": False},
        {"encodes": True},
        {"encodes": True, "mask": False, "positions": False},
    ],
    ids=str,
)
def made_with(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(request.param)


def cut_of(made_with: dict[str, Any]) -> DecoderCut:
    files = exported(**made_with)
    name = "decoder_with_past_model.onnx" if made_with.get("encodes") else "model.onnx"
    return DecoderCut(decoder_of(onnx.load_from_string(files[name]), name))


def truth(made_with: dict[str, Any]) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Inputs of a step, and what the export gives, under our names, with states before layers."""
    cut, feeds = cut_of(made_with), feeds_of(encodes=bool(made_with.get("encodes")))
    model = onnx.ModelProto()
    model.CopyFrom(cut.export.proto)
    for border in cut.borders:
        model.graph.output.add(name=border).type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    given = run(model, feeds)
    side = ".decoder" if made_with.get("encodes") else ""
    for n in range(LAYERS):
        for kind in KINDS:
            given[new_name(n, kind)] = given[f"present.{n}{side}.{kind}"][:, :, PAST:]
    for n, border in enumerate(cut.borders):
        given[f"state {n}"] = given[border]
    return feeds, given


def test_segments_chained_compute_what_the_model_does(made_with: dict[str, Any]) -> None:
    cut = cut_of(made_with)
    feeds, right = truth(made_with)
    for ends in ([1, 2, 3, 4], [2, 4], [4]):
        fed = dict(feeds)
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            given = parted(run(segment_graph(cut, start, end), fed), start, end)
            layers = [new_name(n, kind) for n in range(start, end) for kind in KINDS]
            assert sorted(given) == sorted([NEXT_STATE, *layers])
            for name in layers:
                np.testing.assert_allclose(given[name], right[name], atol=TOLERANCE)
            np.testing.assert_allclose(given[NEXT_STATE], right[f"state {end}"], atol=TOLERANCE)
            fed[STATE] = given[NEXT_STATE]
        logits = run(logits_graph(cut), fed)[LOGITS]
        np.testing.assert_allclose(logits, right["logits"], atol=1e-4)


def test_propagation_of_true_states_gives_the_true_keys_and_values(
    made_with: dict[str, Any],
) -> None:
    cut = cut_of(made_with)
    feeds, right = truth(made_with)
    for n in range(1, LAYERS):
        fed = feeds | {STATE: right[f"state {n}"]}
        given = parted(run(propagation_graph(cut, n, n + 1), fed), n, n + 1)
        assert sorted(given) == [new_name(n, kind) for kind in KINDS]
        for name, new in given.items():
            np.testing.assert_allclose(new, right[name], atol=TOLERANCE)
    state = feeds | {STATE: right["state 1"]}
    whole = parted(run(propagation_graph(cut, 1, LAYERS), state), 1, LAYERS)
    assert len(whole) == 2 * (LAYERS - 1)
    for n in range(1, LAYERS):
        one = run(propagation_graph(cut, n, n + 1), state)
        for name, new in parted(one, n, n + 1).items():
            np.testing.assert_array_equal(whole[name], new)


def test_segments_read_their_own_caches_and_hold_their_own_weights() -> None:
    graphs = graphs_of()
    middle = onnx.load_from_string(graphs.graphs["stages/01.onnx"]).graph
    own = {past_name(n, kind) for n in (1, 2) for kind in KINDS}
    assert {i.name for i in middle.input} == {STATE, "attention_mask", *own}
    first = onnx.load_from_string(graphs.graphs["stages/00.onnx"]).graph
    held = [
        {t.name for t in graph.initializer if len(t.raw_data) > 64} for graph in (middle, first)
    ]
    assert held[0].isdisjoint(held[1])
    assert graphs.model.layers_of(1) == range(1, 3)
    assert [stage.end for stage in graphs.model.stages] == [1, 3, LAYERS]


@pytest.mark.parametrize("criterion", ["softmax margin", "max probability"])
def test_a_head_gives_token_and_confidence(criterion: Any) -> None:
    cut = cut_of({})
    states = np.random.default_rng(1).standard_normal((20, 1, WIDTH)).astype(np.float32) * 2
    logits = run(logits_graph(cut), {STATE: states})[LOGITS][:, 0].astype(np.float64)
    given = run(head_graph(cut, criterion), {STATE: states})
    odds = np.exp(logits - logits.max(1, keepdims=True))
    shares = np.sort(odds / odds.sum(1, keepdims=True))
    second = shares[:, -2] if criterion == "softmax margin" else 0
    assert given[ANSWER].tolist() == logits.argmax(1).tolist()
    np.testing.assert_allclose(given[CONFIDENCE], shares[:, -1] - second, atol=1e-5)


def adapter(scale: float) -> onnx.ModelProto:
    """A graph that multiplies the state."""
    sizes = ["batch", "tokens", WIDTH]
    infos = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, sizes)
        for name in (STATE, NEXT_STATE)
    ]
    weight = numpy_helper.from_array(np.full(WIDTH, scale, np.float32), "scale")
    node = helper.make_node("Mul", [STATE, "scale"], [NEXT_STATE])
    graph = helper.make_graph([node], "adapter", infos[:1], infos[1:], [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_an_adapter_changes_its_exit_and_nothing_else(tmp_path: Path) -> None:
    path = write(exported(), tmp_path)
    graphs = cut_at(path, adapters=[adapter(-1.0), None])
    assert graphs.model.stages[0].adapter == "adapter/00.onnx"
    told = []
    for one in (graphs, graphs_of()):
        backend = backend_of(one, slots=3)
        for slot in range(3):
            backend.open(slot, np.arange(slot, slot + 5))
        backend.prefill([0, 1, 2])
        told.append([backend.run(stage, [0, 1, 2]).tokens.tolist() for stage in range(3)])
    assert told[0][0] != told[1][0]
    assert told[0][1:] == told[1][1:]


def renamed(files: dict[str, bytes], names: dict[str, str]) -> onnx.ModelProto:
    model = onnx.load_from_string(files["model.onnx"])
    for info in (*model.graph.input, *model.graph.output):
        info.name = names.get(info.name, info.name)
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    return model


def test_names_of_torchs_exporter_are_known() -> None:
    names = {
        f"past_key_values.{n}.{kind}": f"past_key_values_{kind}_cache_{n}"
        for n in range(LAYERS)
        for kind in KINDS
    }
    export = decoder_of(renamed(exported(), names), "model.onnx")
    assert [layer.past["key"] for layer in export.layers] == [
        f"past_key_values_key_cache_{n}" for n in range(LAYERS)
    ]
    assert (export.vocabulary, export.mask, export.encodes) == (
        VOCABULARY, "attention_mask", False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("names", "facts"),
    [
        ({"input_ids": "words"}, "no input 'input_ids', inputs are words, attention_mask"),
        ({"logits": "scores"}, "no output 'logits', outputs are scores"),
        ({"position_ids": "type_ids"}, "input 'type_ids' is not a known input of a decoder"),
        ({"past_key_values.2.value": "past_key_values.2.key2"}, "no input past_key_values.2.value"),
        (
            {f"past_key_values.{n}.{k}": f"memory.{n}.{k}" for n in range(LAYERS) for k in KINDS},
            "no input past_key_values.0.key, inputs are input_ids",
        ),
        ({"past_key_values.3.key": "past_key_values.4.key"}, "no input past_key_values.3.key"),
    ],
)
def test_a_name_that_lacks_is_told_with_the_remedy(names: dict[str, str], facts: str) -> None:
    with pytest.raises(ModelError, match=re.escape(facts) + ".*optimum-cli export onnx"):
        decoder_of(renamed(exported(), names), "model.onnx")


def test_a_cache_that_is_no_join_is_refused() -> None:
    model = onnx.load_from_string(exported()["model.onnx"])
    node = next(n for n in model.graph.node if "past_key_values.1.key" in n.input)
    node.op_type, node.input[:] = "Identity", [node.input[1]]
    del node.attribute[:]
    extra = helper.make_node("Abs", ["past_key_values.1.key"], ["unused"])
    model.graph.node.append(extra)
    with pytest.raises(ModelError, match=r"'past_key_values\.1\.key' is not joined .* Concat"):
        decoder_of(model, "model.onnx")


def test_layers_that_are_not_one_after_another_are_refused() -> None:
    model = onnx.load_from_string(exported()["model.onnx"])
    cut = DecoderCut(decoder_of(model, "model.onnx"))
    # The first border is added to the last state too: then nothing is between layers alone.
    last = cut.borders[-1]
    for node in model.graph.node:
        node.input[:] = [f"{last}/sum" if name == last else name for name in node.input]
    place = next(i for i, node in enumerate(model.graph.node) if last in node.output)
    model.graph.node.insert(
        place + 1, helper.make_node("Add", [last, cut.borders[0]], [f"{last}/sum"])
    )
    broken = DecoderCut(decoder_of(model, "model.onnx"))
    with pytest.raises(ModelError, match="before layer 1 and those from it on"):
        _ = broken.borders


@pytest.mark.parametrize("layers", [(0,), (4,), (3, 1), (2, 2)])
def test_exits_that_are_not_between_layers_are_refused(
    layers: tuple[int, ...], tmp_path: Path
) -> None:
    path = write(exported(), tmp_path)
    with pytest.raises(ModelError, match=r"from 1 to 3: the model has 4 layers"):
        cut_at(path, layers)


@pytest.mark.parametrize(
    "name", ["encoder_model.onnx", "decoder_model.onnx", "decoder_with_past_model.onnx"]
)
def test_a_folder_without_a_file_is_refused(name: str, tmp_path: Path) -> None:
    files = exported(encodes=True)
    path = write({n: content for n, content in files.items() if n != name}, tmp_path)
    with pytest.raises(ModelError, match=f"has no {name}"):
        read_export(path)


def test_encoder_decoders_need_their_folder_and_a_start_token(tmp_path: Path) -> None:
    path = write(exported(encodes=True), tmp_path)
    with pytest.raises(ModelError, match=r"pass the folder with encoder_model\.onnx"):
        read_export(path / "decoder_with_past_model.onnx")
    exits = [TextExit(layer=2, threshold=0.5)]
    with pytest.raises(ModelError, match="decoder_start_token_id"):
        cut_export(read_export(path), exits)
    told: TextGraphs = cut_export(read_export(path), exits, start_token=START, stop_tokens=[2])
    assert (told.model.start_token, told.model.stop_tokens) == (START, (2,))
    (tmp_path / "decoder_model.onnx").write_bytes(b"none")
    with pytest.raises(ModelError, match=r"decoder_model\.onnx cannot be read"):
        read_export(path)
