"""Passes of preparation: what they require is there, and what they ensure holds."""

from __future__ import annotations

import onnx
import pytest
from tests import models

from offramp.compiler.frontend import passes
from offramp.compiler.frontend.passes import SLICEABLE, ModelDraft, PassError, Property, prepare


def test_a_model_that_is_prepared_has_every_property() -> None:
    draft = ModelDraft(proto=models.residual_cnn())
    prepare(draft, SLICEABLE)
    assert draft.holding == set(Property)
    assert all(each.holds(draft.proto) for each in Property)
    assert draft.unread == ()


@pytest.mark.parametrize(
    ("early", "before"),
    [
        (passes.FREE_BATCH, "INPUTS_READ, KNOWN, MODERN"),
        (passes.SETTLE_INPUTS, "PRUNED, WEIGHTS_UNLISTED"),
        (passes.TURN_BATCH_FIRST, "ANNOTATED, BATCH_FREE, NAMED"),
    ],
)
def test_a_pass_does_not_run_before_what_it_requires(early: passes.Pass, before: str) -> None:
    draft = ModelDraft(proto=models.residual_cnn())
    untouched = draft.proto.SerializeToString()
    with pytest.raises(PassError, match=f"^{early.name}: before {before}$"):
        prepare(draft, [early])
    assert draft.proto.SerializeToString() == untouched


def test_what_a_pass_breaks_has_to_be_mended_before_it_is_required() -> None:
    order = [each for each in SLICEABLE if each not in (passes.NAME_OPERATORS, passes.ANNOTATE)]
    with pytest.raises(PassError, match=r": before ANNOTATED, NAMED$"):
        prepare(ModelDraft(proto=models.residual_cnn()), order)


def doubled_names(proto: onnx.ModelProto) -> None:
    for node in proto.graph.node:
        node.name = "same"


def stale_shapes(proto: onnx.ModelProto) -> None:
    proto.graph.value_info.add(name="gone")


def fixed_batch(proto: onnx.ModelProto) -> None:
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 4


def unread_input(proto: onnx.ModelProto) -> None:
    proto.graph.input.add().CopyFrom(proto.graph.input[0])
    proto.graph.input[1].name = "unread"


def two_answers(proto: onnx.ModelProto) -> None:
    proto.graph.output.add().CopyFrom(proto.graph.output[0])


def unused_operator(proto: onnx.ModelProto) -> None:
    proto.graph.node.append(onnx.helper.make_node("Neg", [proto.graph.input[0].name], ["unused"]))


def listed_weight(proto: onnx.ModelProto) -> None:
    proto.graph.input.add(name=proto.graph.initializer[0].name)


def old_format(proto: onnx.ModelProto) -> None:
    proto.ir_version = 7


SPOILT = {
    Property.NAMED: doubled_names,
    Property.ANNOTATED: stale_shapes,
    Property.BATCH_FREE: fixed_batch,
    Property.INPUTS_READ: unread_input,
    Property.ONE_ANSWER: two_answers,
    Property.PRUNED: unused_operator,
    Property.WEIGHTS_UNLISTED: listed_weight,
    Property.MODERN: old_format,
}


@pytest.mark.parametrize("lacking", SPOILT, ids=lambda each: each.name)
def test_a_pass_that_does_not_do_what_it_ensures_is_found(lacking: Property) -> None:
    draft = ModelDraft(proto=models.residual_cnn())
    prepare(draft, SLICEABLE)
    spoil = passes.Pass(
        name="spoil", run=lambda d: SPOILT[lacking](d.proto), ensures=frozenset({lacking})
    )
    with pytest.raises(PassError, match=f"^spoil: without {lacking.name}$"):
        prepare(draft, [spoil])
