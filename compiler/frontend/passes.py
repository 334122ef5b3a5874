"""Preparation of a model as a list of passes, each of which states what it requires and ensures.

Read :data:`SLICEABLE` from top to bottom: it lists the steps before slicing, and its requirements
explain the order. :func:`prepare` checks what a pass requires before running the pass, and what it
ensures afterwards. The passes are written like those of onnx/ir-py, but work on ``ModelProto``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import onnx

from offramp.bundle.schema.inputs import UnreadInput
from offramp.compiler.cuts.cuts import MAX_CUT_TENSORS
from offramp.compiler.frontend import preparation
from offramp.compiler.frontend.answer import answer_with_classes, keep_answer
from offramp.compiler.frontend.answer_tokens import answer_with_tokens
from offramp.compiler.frontend.batch import fix_baked_sizes, free_batch
from offramp.compiler.frontend.cut_preparation import anchor_shapes, turn_batch_first
from offramp.compiler.frontend.decoder_cache import check_no_cache
from offramp.compiler.frontend.model_checks import (
    check_batch_first,
    check_inference,
    check_inputs,
    check_some_input,
)
from offramp.compiler.frontend.preparation import MIN_IR_VERSION, MIN_OPSET, specs
from offramp.compiler.graphs.graph import Dataflow, default_opset, read_names, written_names
from offramp.compiler.graphs.runtime import check_operators
from offramp.compiler.graphs.shapes import BATCH, annotate
from offramp.compiler.graphs.source_model import DeclaredInputs, drop_unread
from offramp.compiler.graphs.weights import WeightFile


class PassError(Exception):
    """A pass was run too early, or a property that it ensures does not hold."""


@dataclass(slots=True, kw_only=True)
class ModelDraft:
    """A model that is being prepared, with the user's options and the results of passes."""

    proto: onnx.ModelProto
    """The model. Passes own it: they change it in place or replace it."""
    answer: str | None = None
    """Name of the output to keep, if there are several."""
    answer_tokens: tuple[int, ...] = ()
    """Ids of the tokens that a decoder answers with; empty for every other model."""
    class_map: bool = False
    """True if the model shall answer with the class of each position."""
    simplify_limit_s: float | None = None
    """Longest time in seconds that onnxslim may take; ``None`` to leave the model as it is."""
    weights: WeightFile | None = None
    """File that holds the model's large weights, if they are not inside the model."""
    max_cut_tensors: int = MAX_CUT_TENSORS
    """Largest number of tensors at a cut point."""
    note: Callable[[str], None] = lambda _text: None
    """Called with a sentence for users about each difference from the file."""
    flat: bool = False
    """True if the answer was [batch] in the file; the model's answer is then [batch, 1]."""
    declared: DeclaredInputs | None = None
    """Inputs as the file declares them; ``None`` until a pass has settled the inputs."""
    holding: set[Property] = field(default_factory=set)
    """Properties that passes have ensured so far."""

    @property
    def unread(self) -> tuple[UnreadInput, ...]:
        """Inputs that the file declares but that no operator reads."""
        assert self.declared is not None, "inputs are not settled yet"
        return self.declared.unread(self.proto.graph)


def _known(_proto: onnx.ModelProto) -> bool:
    return True  # :func:`check_operators` raises


def _modern(proto: onnx.ModelProto) -> bool:
    return default_opset(proto) >= MIN_OPSET and proto.ir_version >= MIN_IR_VERSION


def _weights_unlisted(proto: onnx.ModelProto) -> bool:
    constants = {tensor.name for tensor in proto.graph.initializer}
    return constants.isdisjoint(info.name for info in proto.graph.input)


def _one_answer(proto: onnx.ModelProto) -> bool:
    return len(proto.graph.output) == 1


def _pruned(proto: onnx.ModelProto) -> bool:
    flow = Dataflow(proto.graph)
    return len(flow.needed) == len(flow.operators)


def _inputs_read(proto: onnx.ModelProto) -> bool:
    return {info.name for info in proto.graph.input} <= read_names(proto.graph)


def _batch_free(proto: onnx.ModelProto) -> bool:
    fronts = (info.type.tensor_type.shape.dim[0] for info in proto.graph.input)
    return all(front.dim_param == BATCH for front in fronts)


def _named(proto: onnx.ModelProto) -> bool:
    names = [node.name for node in proto.graph.node]
    return all(names) and len(set(names)) == len(names)


def _annotated(proto: onnx.ModelProto) -> bool:
    return {info.name for info in proto.graph.value_info} <= written_names(proto.graph)


class Property(Enum):
    """A property of a model that passes require and ensure; the value holds its check."""

    KNOWN = (_known,)
    """ONNX Runtime has every operator."""
    MODERN = (_modern,)
    """The opset and the file format are new enough."""
    WEIGHTS_UNLISTED = (_weights_unlisted,)
    """Initializers are not listed as inputs."""
    ONE_ANSWER = (_one_answer,)
    """The model has one output, which is the answer."""
    PRUNED = (_pruned,)
    """The answer depends on every operator."""
    INPUTS_READ = (_inputs_read,)
    """Every input is read."""
    BATCH_FREE = (_batch_free,)
    """Dimension 0 of every input is the symbolic batch, and rows do not change each other."""
    NAMED = (_named,)
    """Every operator has a different name."""
    ANNOTATED = (_annotated,)
    """Types and shapes of inner tensors are the inferred ones; none is outdated."""

    def holds(self, proto: onnx.ModelProto) -> bool:
        """Return whether a model has the property, as far as the check can detect."""
        (check,) = self.value
        return bool(check(proto))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A step of preparation, which edits the model of a draft or raises ModelError."""

    name: str
    """Imperative description of the step."""
    run: Callable[[ModelDraft], None]
    requires: frozenset[Property] = frozenset()
    ensures: frozenset[Property] = frozenset()
    breaks: frozenset[Property] = frozenset()
    """Properties that may no longer hold after the pass."""


def prepare(draft: ModelDraft, passes: Sequence[Pass]) -> None:
    """Run passes on a draft, in order; properties from earlier calls are kept in the draft.

    Raises:
        ModelError: A pass refuses the model.
        PassError: A property that a pass requires does not hold yet, or one that it ensures does
            not hold afterwards.
    """
    for each in passes:
        if early := each.requires - draft.holding:
            raise PassError(f"{each.name}: before {_names(early)}")
        each.run(draft)
        draft.holding -= each.breaks
        draft.holding |= each.ensures
        if lacking := {e for e in each.ensures if not e.holds(draft.proto)}:
            raise PassError(f"{each.name}: without {_names(lacking)}")


def _names(properties: Iterable[Property]) -> str:
    return ", ".join(sorted(each.name for each in properties))


def _pass(
    name: str,
    run: Callable[[ModelDraft], None],
    *,
    requires: Iterable[Property] = (),
    ensures: Iterable[Property] = (),
    breaks: Iterable[Property] = (),
) -> Pass:
    return Pass(
        name=name,
        run=run,
        requires=frozenset(requires),
        ensures=frozenset(ensures),
        breaks=frozenset(breaks),
    )


def _convert(draft: ModelDraft) -> None:
    draft.proto = preparation.modern(draft.proto)


def _answer_with_tokens(draft: ModelDraft) -> None:
    if draft.answer_tokens:
        answer_with_tokens(draft.proto, draft.answer_tokens, draft.answer)
    else:
        check_no_cache(draft.proto)


def _give_column(draft: ModelDraft) -> None:
    draft.flat = preparation.give_column(draft.proto)


def _answer_with_classes(draft: ModelDraft) -> None:
    if draft.class_map:
        answer_with_classes(draft.proto)


def _settle_inputs(draft: ModelDraft) -> None:
    draft.declared = DeclaredInputs.of(draft.proto.graph)
    drop_unread(draft.proto.graph)
    check_inputs(draft.proto)
    specs(draft.proto, [info.name for info in draft.proto.graph.input])
    check_batch_first(draft.proto.graph)


def _fix_baked_sizes(draft: ModelDraft) -> None:
    if baked := fix_baked_sizes(draft.proto):
        draft.note(baked)


def _simplify(draft: ModelDraft) -> None:
    if draft.simplify_limit_s is None:
        return
    draft.proto = preparation.simplified(
        draft.proto, limit_s=draft.simplify_limit_s, weights=draft.weights
    )
    drop_unread(draft.proto.graph)
    check_some_input(draft.proto)


def _anchor_shapes(draft: ModelDraft) -> None:
    draft.proto = anchor_shapes(draft.proto, max_tensors=draft.max_cut_tensors)


def _turn_batch_first(draft: ModelDraft) -> None:
    draft.proto = turn_batch_first(draft.proto, max_tensors=draft.max_cut_tensors)


KNOW_OPERATORS = _pass(
    "know every operator", lambda d: check_operators(d.proto), ensures=[Property.KNOWN]
)
CONVERT = _pass("convert an old opset", _convert, ensures=[Property.MODERN])
UNLIST_WEIGHTS = _pass(
    "take weights off the inputs",
    lambda d: preparation.unlist_initializers(d.proto),
    ensures=[Property.WEIGHTS_UNLISTED],
)
REFUSE_CACHE = _pass(
    "refuse caches of a decoder",
    lambda d: check_no_cache(d.proto),
    requires=[Property.WEIGHTS_UNLISTED],
)
ANSWER_WITH_TOKENS = _pass(
    "let a decoder answer with one of some tokens, or refuse its caches",
    _answer_with_tokens,
    requires=[Property.MODERN, Property.WEIGHTS_UNLISTED],
)
KEEP_ANSWER = _pass(
    "keep the one output that is the answer",
    lambda d: keep_answer(d.proto, d.answer, d.note),
    ensures=[Property.ONE_ANSWER],
)
GIVE_COLUMN = _pass(
    "give an answer [batch] a second dimension",
    _give_column,
    requires=[Property.MODERN, Property.ONE_ANSWER],
    ensures=[Property.ONE_ANSWER],
)
ANSWER_WITH_CLASSES = _pass(
    "answer with the class of each place",
    _answer_with_classes,
    requires=[Property.MODERN, Property.ONE_ANSWER],
    ensures=[Property.ONE_ANSWER],
)
REMOVE_UNUSED = _pass(
    "remove what the answer does not depend on",
    lambda d: preparation.remove_unused(d.proto),
    requires=[Property.ONE_ANSWER],
    ensures=[Property.PRUNED],
)
SETTLE_INPUTS = _pass(
    "settle which inputs are read, and check them",
    _settle_inputs,
    requires=[Property.WEIGHTS_UNLISTED, Property.PRUNED],
    ensures=[Property.INPUTS_READ],
)
REFUSE_TRAINING = _pass(
    "refuse operators that drop at random",
    lambda d: check_inference(d.proto.graph),
    requires=[Property.PRUNED],
)
FIX_BAKED_SIZES = _pass(
    "fix sizes that the graph has baked in",
    _fix_baked_sizes,
    requires=[Property.KNOWN, Property.INPUTS_READ],
)
FREE_BATCH = _pass(
    "make the batch symbolic",
    lambda d: free_batch(d.proto),
    requires=[Property.KNOWN, Property.MODERN, Property.INPUTS_READ],
    ensures=[Property.BATCH_FREE, Property.ANNOTATED],
)
SIMPLIFY = _pass(
    "simplify, where that computes the same",
    _simplify,
    requires=[Property.BATCH_FREE],
    ensures=[Property.INPUTS_READ],
    breaks=[Property.NAMED, Property.ANNOTATED],
)
NAME_OPERATORS = _pass(
    "name every operator",
    lambda d: preparation.name_operators(d.proto),
    ensures=[Property.NAMED],
)
ANNOTATE = _pass(
    "infer types and shapes", lambda d: annotate(d.proto), ensures=[Property.ANNOTATED]
)
ANCHOR_SHAPES = _pass(
    "compute shapes that cross cut points from the inputs",
    _anchor_shapes,
    requires=[Property.BATCH_FREE, Property.NAMED, Property.ANNOTATED],
    ensures=[Property.ANNOTATED],
)
TURN_BATCH_FIRST = _pass(
    "transpose cut tensors whose batch is not in front",
    _turn_batch_first,
    requires=[Property.BATCH_FREE, Property.NAMED, Property.ANNOTATED],
    ensures=[Property.NAMED, Property.ANNOTATED],
)

SLICEABLE = (
    KNOW_OPERATORS,
    CONVERT,
    UNLIST_WEIGHTS,
    ANSWER_WITH_TOKENS,
    KEEP_ANSWER,
    GIVE_COLUMN,
    ANSWER_WITH_CLASSES,
    REMOVE_UNUSED,
    SETTLE_INPUTS,
    REFUSE_TRAINING,
    FIX_BAKED_SIZES,
    FREE_BATCH,
    SIMPLIFY,
    NAME_OPERATORS,
    ANNOTATE,
    ANCHOR_SHAPES,
    TURN_BATCH_FIRST,
)
"""Passes, in order, that prepare a file's model for slicing."""
