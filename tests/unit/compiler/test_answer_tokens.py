"""Decoders are reduced to the tokens that they answer with, and answer as the whole model does."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper
from tests import models
from tests.decoders import (
    ENDS,
    LAYERS,
    TOKENS,
    VOCABULARY,
    decoder,
    prompts,
    summing,
    with_past,
)
from tests.facts import Told, facts, tells
from tests.padded import paddings_of
from tests.sliced import slice_proto

from offramp.bundle import Head
from offramp.bundle.schema.answers import Answer
from offramp.bundle.schema.serde import from_plain, to_plain
from offramp.calibration.data.dataset import DataError, Dataset
from offramp.compiler.commands.cli import main
from offramp.compiler.common.errors import ModelError
from offramp.compiler.common.options import TaskOptions
from offramp.compiler.cuts.cuts import find_cuts
from offramp.compiler.frontend import answer, answer_tokens
from offramp.compiler.frontend.answer_tokens import check_lengths
from offramp.compiler.graphs.runtime import GraphRunner
from offramp.compiler.graphs.source_model import SourceModel
from offramp.engine.answers.differences import relative_difference

Read = Callable[..., SourceModel]
Feeds = dict[str, NDArray[Any]]

TOLERANCE = 1e-4
"""Tolerance relative to the largest value: single precision, with sums in another order."""


def whole_answers(proto: onnx.ModelProto, feeds: Feeds, tokens: tuple[int, ...]) -> NDArray[Any]:
    """Return the columns of the whole model's logits at the last token that counts."""
    mask = feeds.get("attention_mask", np.ones_like(feeds["input_ids"]))
    last = [int(np.flatnonzero(row)[-1]) for row in mask]
    logits = GraphRunner(proto).run(with_past(proto, feeds))["logits"]
    return np.stack([logits[row, at][list(tokens)] for row, at in enumerate(last)])


def reduced_answers(model: SourceModel, feeds: Feeds) -> NDArray[Any]:
    return GraphRunner(model.proto).run(feeds)["logits"]


@pytest.mark.parametrize("cache", [False, True])
def test_the_reduced_model_chooses_as_the_whole_one_on_1000_prompts(
    read: Read, *, cache: bool
) -> None:
    proto = decoder(cache=cache)
    model = read(proto, answer_tokens=TOKENS)
    assert model.answer == Answer(output="logits", classes=3, form="logits", tokens=TOKENS)
    assert [spec.describe() for spec in model.inputs] == [
        "input_ids: int64 [batch, sequence]",
        "attention_mask: int64 [batch, sequence]",
    ]
    chosen = set()
    for part in range(10):
        feeds = prompts(100, 20, left=part % 2 == 1, seed=part)
        wanted = whole_answers(decoder(cache=cache), feeds, TOKENS)
        found = reduced_answers(model, feeds)
        assert relative_difference(found, wanted) < TOLERANCE
        assert (found.argmax(axis=1) == wanted.argmax(axis=1)).all()
        chosen |= set(wanted.argmax(axis=1).tolist())
    assert chosen == {0, 1, 2}


@pytest.mark.parametrize("left", [False, True])
def test_padded_prompts_are_answered_as_alone(read: Read, *, left: bool) -> None:
    model = read(decoder(cache=True), answer_tokens=TOKENS)
    feeds = prompts(30, 24, left=left)
    together = reduced_answers(model, feeds)
    for row, mask in enumerate(feeds["attention_mask"]):
        alone = {name: array[row : row + 1, mask == 1] for name, array in feeds.items()}
        assert relative_difference(reduced_answers(model, alone)[0], together[row]) < TOLERANCE


@pytest.mark.parametrize("simplify", [False, True])
@pytest.mark.parametrize("cache", [False, True])
def test_a_decoder_has_a_cut_after_every_layer_except_the_last(
    read: Read, *, cache: bool, simplify: bool
) -> None:
    model = read(decoder(cache=cache), answer_tokens=TOKENS, simplify=simplify)
    found = find_cuts(model)
    assert len(found.cuts) >= LAYERS - 1
    inner = [cut for cut in found.cuts if cut.shape == ("batch", "sequence", 16)]
    assert len(inner) >= LAYERS - 1


def test_what_no_other_token_needs_is_computed_of_the_last_alone(read: Read) -> None:
    """The feed-forward block of the last layer is after the gathering: it reads one token."""
    model = read(decoder(), answer_tokens=TOKENS, simplify=False)
    kinds = [node.op_type for node in model.proto.graph.node]
    behind = kinds[kinds.index("GatherND") :]
    assert behind.count("LayerNormalization") == 2  # of the feed-forward block, and the final one
    assert kinds.count("LayerNormalization") == 2 * LAYERS + 1


def test_the_words_that_are_no_answers_go(read: Read) -> None:
    model = read(summing(), answer_tokens=TOKENS)
    assert [VOCABULARY in tensor.dims for tensor in model.proto.graph.initializer].count(True) == 1


@pytest.mark.parametrize("opset", [17, 18])
@pytest.mark.parametrize("end", ENDS)
def test_ends_of_decoders(read: Read, end: str, opset: int) -> None:
    proto = summing(end, opset=opset)
    model = read(proto, answer_tokens=TOKENS)
    feeds = prompts(20, 9)
    wanted = whole_answers(summing(end, opset=opset), feeds, TOKENS)
    assert relative_difference(reduced_answers(model, feeds), wanted) < TOLERANCE
    kinds = [node.op_type for node in model.proto.graph.node]
    assert kinds.index("CumSum") < kinds.index("GatherND") < kinds.index("Sqrt")


def test_without_a_mask_the_last_place_answers(
    read: Read, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model = read(summing(mask=False), answer_tokens=TOKENS)
    feeds = {"input_ids": prompts(6, 9)["input_ids"]}
    wanted = whole_answers(summing(mask=False), feeds, TOKENS)
    assert relative_difference(reduced_answers(model, feeds), wanted) < TOLERANCE
    assert "equal on 18 prompts of 3 lengths" in caplog.text
    tells(caplog.text, "mask", "last position")


def test_a_batch_that_was_exported_fixed_is_freed(read: Read) -> None:
    model = read(summing(batch=1), answer_tokens=TOKENS)
    feeds = prompts(20, 9)
    wanted = whole_answers(summing(), feeds, TOKENS)
    assert relative_difference(reduced_answers(model, feeds), wanted) < TOLERANCE


def test_the_output_may_be_named(read: Read) -> None:
    proto = summing()
    proto.graph.output[0].name = proto.graph.node[-1].output[0] = "scores"
    proto.graph.output.append(helper.make_tensor_value_info("t0", TensorProto.FLOAT, list("abc")))
    with pytest.raises(ModelError, match="2 outputs"):
        read(proto, answer_tokens=TOKENS)
    assert read(proto, answer_tokens=TOKENS, answer="scores").answer.output == "scores"


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ((3,), ("--answer-tokens 3", "1 token", "two or more")),
        ((3, 7, 3), ("--answer-tokens", "3 is named twice", "a separate answer")),
        ((3, 40), ("--answer-tokens", "40", "0 to 39")),
        ((-1, 3), ("--answer-tokens", "-1")),
    ],
)
def test_tokens_that_cannot_be_answers(read: Read, tokens: tuple[int, ...], message: Told) -> None:
    with pytest.raises(ModelError, match=facts(*message)):
        read(summing(), answer_tokens=tokens)


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (models.bert_like, ("shape [batch, 3]", "[batch, tokens, vocabulary]")),
        (models.residual_cnn, ("[batch, tokens]", "inputs are")),
        (lambda: summing("softmax"), ("projection to the vocabulary", "(Softmax)", "expected")),
        (lambda: summing("mixed"), ("projection to the vocabulary", "(CumSum)", "expected")),
    ],
)
def test_what_is_no_decoder_is_refused(
    read: Read, made: Callable[[], onnx.ModelProto], told: Told
) -> None:
    with pytest.raises(ModelError, match=facts(*told)):
        read(made(), answer_tokens=(1, 2))


def test_logits_of_the_last_place_alone_are_not_enough(read: Read) -> None:
    proto = summing()
    end = proto.graph.output[0]
    end.CopyFrom(helper.make_tensor_value_info("logits", TensorProto.FLOAT, list("abc")))
    proto.graph.node[-1].output[0] = "all"
    last = helper.make_node("ReduceMax", ["all"], ["logits"], axes=[1], keepdims=1)
    proto.graph.node.append(last)
    with pytest.raises(ModelError, match=facts("[6, 1, 40]", "6 prompts of 3 tokens")):
        read(proto, answer_tokens=TOKENS)


def test_a_cache_inside_of_an_operator_is_refused(read: Read) -> None:
    proto = decoder(cache=True)
    past = ["past_key_values.0.key", "past_key_values.0.value"]
    fused = helper.make_node(
        "GroupQueryAttention", [past[0]] * 3 + past, ["never"], name="attend",
        domain="com.microsoft", num_heads=2, kv_num_heads=1,
    )  # fmt: skip
    proto.graph.node.insert(0, fused)
    proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    with pytest.raises(
        ModelError, match=r"'attend' \(GroupQueryAttention\) contains the cache"
    ) as e:
        read(proto, answer_tokens=TOKENS)
    assert "export the decoder without this fusion" in str(e.value)


def test_an_operator_of_onnx_runtime_that_reads_a_past_is_refused(read: Read) -> None:
    proto = decoder(cache=True)
    first = next(node for node in proto.graph.node if "past_key_values.0.key" in node.input)
    first.op_type, first.domain = "MultiHeadAttention", "com.microsoft"
    proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    with pytest.raises(ModelError, match=r"\(MultiHeadAttention\) contains the cache"):
        read(proto, answer_tokens=TOKENS)


def test_two_decoders_in_one_are_refused(read: Read) -> None:
    proto = decoder(cache=True)
    branch = helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1])
    proto.graph.input.append(branch)
    with pytest.raises(ModelError, match=facts("'use_cache_branch'", "decoder")):
        read(proto, answer_tokens=TOKENS)


def test_a_past_of_fixed_length_is_refused(read: Read) -> None:
    proto = decoder(cache=True)
    past = next(info for info in proto.graph.input if info.name == "past_key_values.1.value")
    past.type.tensor_type.shape.dim[2].dim_value = 4
    with pytest.raises(ModelError, match=facts("'past_key_values.1.value'", "[batch, 2, 4, 8]")):
        read(proto, answer_tokens=TOKENS)


def test_a_decoder_that_fails_is_told(read: Read) -> None:
    proto = summing()
    for tensor in proto.graph.initializer:
        if list(tensor.dims) == [VOCABULARY, 8]:
            tensor.dims[:] = [4, 80]  # the width no longer fits
    with pytest.raises(ModelError, match=facts("random prompts", "ONNX Runtime")):
        read(proto, answer_tokens=(1, 2))


def test_another_answer_is_a_defect_that_is_found(
    read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_tokens._Reduction, "_taken", lambda _s, t, _a, _t: t)
    with pytest.raises(ModelError, match="differ from the model's by inf: "):
        read(summing(), answer_tokens=TOKENS)

    def others(self: Any, tensor: str, axis: int, tokens: tuple[int, ...]) -> str:
        return taken(self, tensor, axis, [token + 1 for token in tokens])

    monkeypatch.undo()
    taken = answer_tokens._Reduction._taken
    monkeypatch.setattr(answer_tokens._Reduction, "_taken", others)
    with pytest.raises(ModelError, match=facts("reduced logits", "report")):
        read(summing(), answer_tokens=TOKENS)


def test_prompts_of_different_length_are_padded_exactly() -> None:
    pieces = slice_proto(decoder(cache=True), answer_tokens=TOKENS)
    heads = (Head(kind="last"), Head(kind="attention", queries=2), Head(kind="last"))
    assert {cut.answers_last for cut in pieces.cuts} == {True}
    (found,) = paddings_of(pieces, prompts(40, 10), heads)
    assert (found.size, found.mask) == ("sequence", "attention_mask")
    assert found.longest >= 40
    assert found.difference < TOLERANCE


def test_prompts_of_different_length_need_a_mask(read: Read) -> None:
    model = read(summing(mask=False), answer_tokens=TOKENS)
    (spec,) = model.inputs
    ids = np.arange(48).reshape(4, 12) % 30 + 5

    def data(ids: NDArray[Any]) -> Dataset:
        return Dataset(inputs={"input_ids": ids}, labels=None, sha256="0")

    check_lengths(model.inputs, data(ids))
    alike = ids.copy()
    alike[:, -4:] = 0
    check_lengths(model.inputs, data(alike))  # all end so: nothing tells that it is padding
    alike[2, -6:] = 0
    with pytest.raises(DataError, match=facts("`input_ids`", "token 0", "4 to 6")):
        check_lengths(model.inputs, data(alike))
    masked = replace(spec, name="attention_mask")
    check_lengths((spec, masked), data(alike))


def test_the_manifest_has_as_many_tokens_as_classes() -> None:
    with pytest.raises(ValueError, match=facts("answer.tokens", "2 ids", "expected", "3")):
        Answer(output="logits", classes=3, form="logits", tokens=(1, 2))
    plain = to_plain(Answer(output="logits", classes=3, form="logits"))
    assert "tokens" not in plain
    told = Answer(output="logits", classes=2, form="logits", tokens=(9, 4))
    assert from_plain(Answer, to_plain(told), "answer") == told


def test_inspect_takes_the_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, told = tmp_path / "decoder.onnx", tmp_path / "told.json"
    onnx.save(decoder(cache=True), path)
    assert main(["inspect", str(path), "--answer-tokens", "7,31,2", "--json", str(told)]) == 0
    assert "logits: 3 classes, logits, of the tokens 7, 31, 2" in capsys.readouterr().out
    assert '"tokens": [\n   7,\n   31,\n   2\n  ]' in told.read_text()
    with pytest.raises(SystemExit):
        main(["inspect", str(path), "--answer-tokens", "yes,no"])
    tells(capsys.readouterr().err, "'yes,no'", "ids of tokens", "2152,9693")


def test_without_the_flag_the_error_names_it(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    told = "40 numbers for each token: if it is a decoder .* by --answer-tokens; .*--task token"
    monkeypatch.setattr(answer, "_MOST_TAGS", 39)
    with pytest.raises(ModelError, match=told):
        read(decoder(), simplify=False)
    asked = TaskOptions(kind="token-classification")
    assert read(decoder(), simplify=False, task=asked).answer.classes == 40
