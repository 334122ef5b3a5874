"""A fixed batch is made symbolic, wherever its size is, or the blocking operator is named."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from tests import models
from tests.facts import tells

from offramp.compiler.common.errors import ModelError
from offramp.compiler.frontend.batch import free_batch
from offramp.compiler.graphs.runtime import GraphRunner, random_inputs
from offramp.compiler.graphs.shapes import annotate
from offramp.engine.answers.differences import relative_difference

Make = Callable[[int], onnx.ModelProto]


def ended(b: models.Builder, x: str, width: int, batch: int, *, opset: int = 18) -> onnx.ModelProto:
    """End with a linear layer over what is flattened."""
    b.linear(b.node("Flatten", x, axis=1), width, 3, out="logits")
    b.output("logits", [batch, 3])
    return b.build(opset=opset)


def ints(b: models.Builder, *values: int) -> str:
    return b.constant(list(values), np.int64)


def zero_means_zero(batch: int) -> onnx.ModelProto:
    """Return the form that torch's exporter writes since it is based on torch.export."""
    b = models.Builder()
    x = b.node("Reshape", b.input("x", [batch, 4, 8]), ints(b, batch, 32), allowzero=1)
    b.linear(x, 32, 3, out="logits")
    b.output("logits", [batch, 3])
    return b.build(opset=18)


def attention(batch: int) -> onnx.ModelProto:
    """Return attention with heads next to the batch, after tokens: torch's
    nn.MultiheadAttention.
    """
    b = models.Builder()
    x = b.node("Transpose", b.input("x", [batch, 5, 8]), perm=[1, 0, 2])
    heads = ints(b, 5, batch * 2, 4)
    q, k = (b.node("Reshape", b.matmul(x, 8, 8), heads) for _ in "qk")
    q, k = (b.node("Transpose", part, perm=[1, 0, 2]) for part in (q, k))
    scores = b.node("Softmax", b.node("MatMul", q, b.node("Transpose", k, perm=[0, 2, 1])))
    mixed = b.node("Transpose", b.node("MatMul", scores, k), perm=[1, 0, 2])
    rows = b.linear(b.node("Reshape", mixed, ints(b, 5 * batch, 8), allowzero=1), 8, 8)
    back = b.node("Transpose", b.node("Reshape", rows, ints(b, 5, batch, 8)), perm=[1, 0, 2])
    return ended(b, back, 40, batch)


def class_tokens(batch: int) -> onnx.ModelProto:
    """A constant with a row for each sample, all equal, is joined."""
    b = models.Builder()
    token = np.random.default_rng(1).standard_normal((1, 1, 8)).astype(np.float32)
    x = b.node("Relu", b.matmul(b.input("x", [batch, 4, 8]), 8, 8))
    x = b.node("Concat", b.constant(np.repeat(token, batch, 0)), x, axis=1)
    return ended(b, x, 40, batch)


def positions(batch: int) -> onnx.ModelProto:
    """Position ids [batch, tokens] are constant, and what is looked up is added."""
    b = models.Builder()
    ids = b.input("ids", [batch, 4], TensorProto.INT64)
    x = b.node("Gather", b.weight(9, 8), ids)
    at = b.node("Expand", b.constant([[0, 1, 2, 3]], np.int64), ints(b, batch, 4))
    return ended(b, b.node("Add", x, b.node("Gather", b.weight(4, 8), at)), 32, batch)


def masked(batch: int) -> onnx.ModelProto:
    """A mask is expanded to a constant shape that holds the batch."""
    b = models.Builder()
    x, mask = b.input("x", [batch, 4, 8]), b.input("mask", [batch, 4, 1])
    return ended(b, b.node("Mul", x, b.node("Expand", mask, ints(b, batch, 4, 8))), 32, batch)


def recurrent(batch: int) -> onnx.ModelProto:
    b = models.Builder()
    x = b.node("Transpose", b.input("x", [batch, 5, 8]), perm=[1, 0, 2])
    state = b.constant(np.full((1, batch, 6), 0.5, np.float32))
    weights = (b.constant(b._rng.standard_normal(s), np.float32) for s in ((1, 18, 8), (1, 18, 6)))
    b._nodes.append(
        onnx.helper.make_node("GRU", [x, *weights, "", "", state], ["", "last"], hidden_size=6)
    )
    return ended(b, b.node("Transpose", "last", perm=[1, 0, 2]), 6, batch)


def sliced(batch: int) -> onnx.ModelProto:
    """A slice that takes all rows names their number."""
    b = models.Builder()
    x = b.input("x", [batch, 4, 8])
    x = b.node("Slice", x, ints(b, 0, 1), ints(b, batch, 3), ints(b, 0, 1))
    return ended(b, x, 16, batch)


def squeezed(batch: int) -> onnx.ModelProto:
    """A squeeze of all axes of one keeps a batch of one."""
    b = models.Builder()
    x = b.node("GlobalAveragePool", b.input("x", [batch, 8, 4, 4]))
    x = b.node("Squeeze", x) if batch > 1 else b.node("Squeeze", x, ints(b, 2, 3))
    b.linear(x, 8, 3, out="logits")
    b.output("logits", [batch, 3])
    return b.build()


def resized(batch: int) -> onnx.ModelProto:
    b = models.Builder()
    x = b.input("x", [batch, 2, 4, 4])
    x = b.node("Resize", x, "", "", ints(b, batch, 2, 2, 2), mode="nearest")
    return ended(b, x, 8, batch)


def last_token(batch: int) -> onnx.ModelProto:
    """The token of each sample that an index names: ``x[arange(batch), last]``."""
    b = models.Builder()
    x, last = b.input("x", [batch, 4, 8]), b.input("last", [batch, 1], TensorProto.INT64)
    rows = b.constant(np.arange(batch)[:, None], np.int64)
    picked = b.node("GatherND", x, b.node("Concat", rows, last, axis=1))
    b.linear(picked, 8, 3, out="logits")
    b.output("logits", [batch, 3])
    return b.build()


def last_token_by_offset(batch: int) -> onnx.ModelProto:
    """The same as torch's older exporter writes it: an offset into what is flattened."""
    b = models.Builder()
    x, last = b.input("x", [batch, 4, 8]), b.input("last", [batch], TensorProto.INT64)
    tokens = b.node("Gather", b.node("Shape", x), b.constant(1, np.int64))
    offsets = b.node("Mul", b.constant(np.arange(batch), np.int64), tokens)
    picked = b.node("Gather", b.node("Reshape", x, ints(b, -1, 8)), b.node("Add", last, offsets))
    b.linear(picked, 8, 3, out="logits")
    b.output("logits", [batch, 3])
    return b.build()


def flattened_mask(batch: int) -> onnx.ModelProto:
    """A mask is looked up by constant indices into what is flattened, as transformers do."""
    b = models.Builder()
    x, mask = b.input("x", [batch, 4, 8]), b.input("mask", [batch, 4])
    flat = b.node("Reshape", mask, ints(b, -1))
    at = np.arange(batch).reshape(-1, 1, 1) * 4 + np.arange(4)[::-1].reshape(1, 4, 1)
    picked = b.node("Gather", flat, b.constant(at, np.int64), axis=0)
    return ended(b, b.node("Mul", x, picked), 32, batch)


def looked_up_by_all(batch: int) -> onnx.ModelProto:
    """The same, as torch's exporter writes it that is built on torch.export."""
    b = models.Builder()
    x, mask = b.input("x", [batch, 4, 8]), b.input("mask", [batch, 4])
    at = np.stack(np.broadcast_arrays(np.arange(batch)[:, None, None], [[[3], [2], [0], [1]]]), -1)
    picked = b.node("GatherND", mask, b.constant(at, np.int64))
    return ended(b, b.node("Mul", x, picked), 32, batch)


def looked_up(batch: int) -> onnx.ModelProto:
    """A constant row of types is looked up by positions, as RoBERTa does."""
    b = models.Builder()
    x, at = b.input("x", [batch, 4, 8]), b.input("at", [batch, 4], TensorProto.INT64)
    types = b.constant(np.repeat([[0.5, 1, 2, 3]], batch, 0), np.float32)
    kinds = b.node("GatherElements", types, at, axis=1)
    return ended(b, b.node("Mul", x, b.node("Unsqueeze", kinds, ints(b, 2))), 32, batch)


def open_tokens(batch: int) -> onnx.ModelProto:
    """The sequence is dynamic, the batch is a constant in a target that is computed."""
    b = models.Builder()
    x = b.input("x", [batch, "tokens", 8])
    rows = b.linear(b.node("Reshape", x, ints(b, -1, 8)), 8, 8)
    tokens = b.node("Gather", b.node("Shape", x), ints(b, 1))
    target = b.node("Concat", ints(b, batch), tokens, ints(b, -1), axis=0)
    x = b.node("Reshape", rows, target)
    b.linear(b.node("ReduceMax", x, axes=[1], keepdims=0), 8, 3, out="logits")
    b.output("logits", [batch, 3])
    return b.build()


def odd_tokens(batch: int) -> onnx.ModelProto:
    """Heads are joined again with the tokens open: seven rows are no multiple of the target."""
    b = models.Builder()
    x = b.matmul(b.input("x", [batch, 5, 8]), 8, 8)
    x = b.node("Softmax", b.node("Reshape", x, ints(b, batch, 5, 2, -1)), axis=-1)
    return ended(b, b.node("Reshape", x, ints(b, batch, -1, 8)), 40, batch)


MODELS: tuple[Make, ...] = (
    zero_means_zero,
    attention,
    class_tokens,
    positions,
    masked,
    recurrent,
    sliced,
    squeezed,
    resized,
    last_token,
    last_token_by_offset,
    flattened_mask,
    looked_up_by_all,
    looked_up,
    open_tokens,
    odd_tokens,
)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_rows_are_answered_as_by_the_original(make: Make, batch: int):
    original, freed = GraphRunner(make(batch)), make(batch)
    free_batch(freed)

    feeds = random_inputs(freed, 6)
    apart = [
        original.run({k: v[i : i + batch] for k, v in feeds.items()})["logits"]
        for i in range(0, 6, batch)
    ]
    wanted, runner = np.concatenate(apart), GraphRunner(freed)
    for size in (1, 5, 6):
        found = runner.run({k: v[:size] for k, v in feeds.items()})["logits"]
        assert found.shape == (size, 3)
        assert relative_difference(found, wanted[:size]) <= 1e-5


def test_the_batch_is_symbolic_inside_too():
    freed = zero_means_zero(1)
    free_batch(freed)
    annotate(freed)

    dims = freed.graph.output[0].type.tensor_type.shape.dim
    assert (dims[0].dim_param, dims[1].dim_value) == ("batch", 3)


def first_row(batch: int) -> onnx.ModelProto:
    b = models.Builder()
    row = b.node("Gather", b.input("x", [batch, 8]), b.constant(0, np.int64), out="row", axis=0)
    b.linear(b.node("Unsqueeze", row, ints(b, 0)), 8, 3, out="logits")
    b.output("logits", [1, 3])
    return b.build()


def without_batch(batch: int) -> onnx.ModelProto:
    b = models.Builder()
    x = b.node("Squeeze", b.input("x", [batch, 8]), ints(b, 0), out="squeezed")
    b.linear(b.node("Unsqueeze", x, ints(b, 0)), 8, 3, out="logits")
    b.output("logits", [1, 3])
    return b.build()


def own_rows(batch: int) -> onnx.ModelProto:
    """Every row of the batch has a constant of its own."""
    b = models.Builder()
    x = b.node("Concat", b.input("x", [batch, 8]), b.weight(batch, 8), out="joined", axis=1)
    b.linear(x, 16, 3, out="logits")
    b.output("logits", [batch, 3])
    return b.build()


@pytest.mark.parametrize(
    ("proto", "node", "reason"),
    [
        (first_row(1), "Gather, which computes 'row'", ("rows 0",)),
        (without_batch(1), "Squeeze, which computes 'squeezed'", ("removes", "batch")),
        (own_rows(2), "Concat, which computes 'joined'", ("'w0'", "different values", "row")),
    ],
)
def test_what_cannot_be_freed_is_named(proto, node, reason):
    with pytest.raises(ModelError) as caught:
        free_batch(proto)

    message = str(caught.value)
    batch = 2 if "'w0'" in reason else 1
    assert f"the batch size was fixed at {batch}" in message
    assert node in message
    tells(message, *reason)
    tells(message, "dynamic first dimension")
