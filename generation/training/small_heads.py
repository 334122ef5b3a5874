"""Small heads of exits: cheaper than the LM head, which is expensive for large vocabularies.

The model's own head is reduced, whatever its operators are: of weights with the vocabulary as an
axis, only some *columns* are kept (the tokens that answers use most), or their *rank* is lowered,
or both. An adapter is added in front, and both are trained on the model's own tokens.

Tokens without a column cannot be answered. One additional column, *other*, represents all of them;
if it wins, the confidence is 0, so that no token leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from torch import Tensor, nn

from offramp.calibration.data.errors import UntrainableError
from offramp.calibration.torch.torch_graph import TorchGraph
from offramp.compiler.common.tensors import array_of
from offramp.compiler.graphs.graph import copied, refill, rename_tensor
from offramp.compiler.graphs.runtime import GraphRunner
from offramp.generation.bundle.tensor_names import ANSWER, CONFIDENCE, LOGITS, STATE
from offramp.generation.bundle.text_model import TextCriterion
from offramp.generation.graphs.heads import with_answer
from offramp.generation.training.adapters import ResidualAdapter
from offramp.generation.training.exit_samples import ExitSamples, ExitTraining, TrainedExit
from offramp.generation.training.fitting import Examples, TokenLesson, fit

_COMPARED = 16
"""Number of states for the comparison between a head with fewer columns and the full head."""
_TOLERANCE = 1e-4
"""Largest relative difference of logits that another order of summation may cause."""
_ADAPTED = "adapted_state"


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallHead(TrainedExit):
    """A graph from `state`, float32 [n, 1, width], to `answer` int64 [n] and `confidence`."""

    answers: NDArray[np.int64]
    """Tokens that the head can answer, increasing; the whole vocabulary if only the rank is low."""
    covered: float
    """Share of the tuning tokens that the head can answer."""


class _Trained(nn.Module):
    """The adapter and the small head."""

    def __init__(self, adapter: ResidualAdapter, head: onnx.ModelProto) -> None:
        super().__init__()
        self.adapter, self.head = adapter, TorchGraph(head)

    def forward(self, states: Tensor) -> Tensor:
        found: Tensor = self.head({STATE: self.adapter(states)[:, None]})[LOGITS][:, 0]
        return found


def train_small_head(
    samples: ExitSamples,
    tuning: ExitSamples,
    logits: onnx.ModelProto,
    *,
    criterion: TextCriterion,
    tokens: int | None = None,
    rank: int | None = None,
    hidden: int | None = None,
    options: ExitTraining,
) -> SmallHead:
    """Train a head of an exit; before training it has the model's own columns.

    Args:
        samples: Tokens to learn.
        tuning: Tokens that decide when training ends.
        logits: The model's norm and LM head, made by ``text_graphs.logits_graph``.
        criterion: Criterion of ``confidence``.
        tokens: Number of tokens that it can answer, the most frequent of ``samples``; all by
            default.
        rank: Rank of the product with the vocabulary; unchanged by default.
        hidden: Size of the adapter's hidden layer, as in :func:`.adapters.train_adapter`.
        options: Length and speed of the training.

    Raises:
        UntrainableError: ``logits`` is not a product of a state and weights with the vocabulary as
            an axis, or has operators that are missing in torch.
    """
    vocabulary = _vocabulary(logits)
    if tokens is None and rank is None:
        raise ValueError("tokens and rank are both None; expected at least one of them")
    answers, head = np.arange(vocabulary), logits
    if tokens is not None:
        answers, others = _frequent(samples.tokens, min(tokens, vocabulary))
        head = _with_columns(logits, vocabulary, np.append(answers, others), samples.states)
    if rank is not None:
        head = _with_rank(head, vocabulary if tokens is None else len(answers) + 1, rank)
    adapter = ResidualAdapter(samples.states, hidden, options.seed)
    module = _Trained(adapter, head)
    before, after = fit(
        module,
        TokenLesson(len(answers)),
        _examples(samples, answers),
        _examples(tuning, answers),
        options=options,
        own=list(module.head.parameters()),
    )
    graph = _with_adapter(adapter, with_answer(module.head.write_back(head), criterion))
    if tokens is not None:
        _name_answers(graph, answers)
    covered = float(np.isin(tuning.tokens, answers).mean())
    return SmallHead(graph=graph, before=before, after=after, answers=answers, covered=covered)


def _frequent(tokens: NDArray[np.int64], count: int) -> tuple[NDArray[np.int64], int]:
    """Return the ``count`` most frequent tokens, increasing, and the next frequent token.

    The column *other* is initialised with the column of this last token.
    """
    found, counts = np.unique(tokens, return_counts=True)
    order = found[np.argsort(-counts, kind="stable")]
    kept = np.sort(order[:count])
    # Any token can initialise *other* if no further token occurs.
    return kept, int(order[count] if len(order) > count else kept[0])


def _examples(samples: ExitSamples, answers: NDArray[np.int64]) -> Examples:
    """Replace tokens by their columns; all others get the number after the last column."""
    places = np.minimum(np.searchsorted(answers, samples.tokens), len(answers) - 1)
    known = answers[places] == samples.tokens
    return Examples(samples.states, np.where(known, places, len(answers)))


def _vocabulary(logits: onnx.ModelProto) -> int:
    info = next(o for o in logits.graph.output if o.name == LOGITS)
    return int(info.type.tensor_type.shape.dim[2].dim_value)


def _with_columns(
    logits: onnx.ModelProto,
    vocabulary: int,
    columns: NDArray[np.int64],
    states: NDArray[np.float32],
) -> onnx.ModelProto:
    """Keep some vocabulary columns, in this order, in all weights with the vocabulary as an axis.

    A run checks that this gives the logits of these tokens.
    """
    head = copied(logits)
    tensors = []
    for tensor in head.graph.initializer:
        if list(tensor.dims).count(vocabulary) == 1:
            axis = list(tensor.dims).index(vocabulary)
            taken = np.take(array_of(tensor), columns, axis)
            tensors.append(numpy_helper.from_array(taken, tensor.name))
        else:
            tensors.append(copied(tensor))
    refill(head.graph.initializer, tensors)
    head.graph.output[0].type.tensor_type.shape.dim[2].dim_value = len(columns)
    feeds = {STATE: np.array(states[:_COMPARED])[:, None]}
    wanted = GraphRunner(logits).run(feeds)[LOGITS][..., columns]
    try:
        found = GraphRunner(head).run(feeds)[LOGITS]
    except RuntimeError as error:
        raise UntrainableError(f"{_CANNOT}: with fewer columns it does not run: {error}") from error
    if found.shape != wanted.shape or not np.allclose(
        found, wanted, rtol=0, atol=_TOLERANCE * float(np.abs(wanted).max())
    ):
        raise UntrainableError(f"{_CANNOT}: with fewer columns it computes other logits")
    return head


_CANNOT = (
    "the LM head cannot be made smaller; expected a product of the state and a matrix with the "
    "vocabulary as an axis; let exits share the model's head"
)


def _with_rank(head: onnx.ModelProto, columns: int, rank: int) -> onnx.ModelProto:
    """Replace the head's matrix by its best approximation of rank ``rank``.

    States are projected onto the matrix's directions with the largest singular values.
    """
    head = copied(head)
    graph = head.graph
    tables = [t for t in graph.initializer if len(t.dims) == 2 and columns in t.dims]
    table = tables[0] if tables else None
    if table is None:
        raise UntrainableError(f"{_CANNOT}: no weight has the vocabulary as an axis")
    names = {table.name}
    for node in graph.node:
        if node.op_type in ("Transpose", "Identity", "Cast") and node.input[0] in names:
            names.add(node.output[0])
    readers = [n for n in graph.node if n.op_type in ("MatMul", "Gemm") and n.input[1] in names]
    if len(readers) != 1:
        raise UntrainableError(f"{_CANNOT}: {table.name!r} is in {len(readers)} products, not 1")
    rows = list(table.dims).index(columns) == 0
    matrix = array_of(table).astype(np.float64)
    matrix = matrix if rows else matrix.T
    if not 0 < rank < matrix.shape[1]:
        raise ValueError(f"rank is {rank}, expected 1 to {matrix.shape[1] - 1}, below the width")
    _, directions = np.linalg.eigh(matrix.T @ matrix)
    kept = directions[:, ::-1][:, :rank]
    smaller = matrix @ kept
    dtype = array_of(table).dtype
    table.CopyFrom(
        numpy_helper.from_array((smaller if rows else smaller.T).astype(dtype), table.name)
    )
    graph.initializer.append(numpy_helper.from_array(kept.astype(dtype), "head/directions"))
    reader = readers[0]
    at = list(graph.node).index(reader)
    turn = helper.make_node(
        "MatMul", [reader.input[0], "head/directions"], ["head/turned"], name="head/turned"
    )
    reader.input[0] = "head/turned"
    refill(graph.node, [*graph.node[:at], turn, *graph.node[at:]])
    del graph.value_info[:]
    return head


def _with_adapter(adapter: ResidualAdapter, head: onnx.ModelProto) -> onnx.ModelProto:
    """Prepend an adapter to a head, in place."""
    graph = head.graph
    nodes, weights = adapter.nodes(STATE, _ADAPTED)
    rename_tensor(graph, STATE, _ADAPTED)
    refill(graph.node, [*nodes, *graph.node])
    graph.initializer.extend(weights)
    return head


def _name_answers(head: onnx.ModelProto, answers: Sequence[int] | NDArray[np.int64]) -> None:
    """Map columns to tokens, and the confidence of the last column to 0, in place.

    The last column, *other*, maps to the first token. Any token would do, because a token with
    confidence 0 does not leave.
    """
    graph = head.graph
    for name in (ANSWER, CONFIDENCE):
        rename_tensor(graph, name, f"column/{name}")
    table = np.append(np.asarray(answers, np.int64), answers[0])
    for name, values in (
        ("column/tokens", table),
        ("column/other", np.array(len(answers), np.int64)),
        ("column/zero", np.array(0, np.float32)),
    ):
        graph.initializer.append(numpy_helper.from_array(values, name))
    steps = (
        ("Gather", ["column/tokens", f"column/{ANSWER}"], ANSWER),
        ("Equal", [f"column/{ANSWER}", "column/other"], "column/lost"),
        ("Where", ["column/lost", "column/zero", f"column/{CONFIDENCE}"], CONFIDENCE),
    )
    graph.node.extend(
        helper.make_node(kind, reads, [to], name=f"column/{kind}") for kind, reads, to in steps
    )
