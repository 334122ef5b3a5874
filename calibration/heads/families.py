"""The kinds of heads: how each pools its cut tensor, and which of them are tried at a cut point.

Apparate 3.1 pools globally and adds one linear layer. A coarse grid instead of global pooling keeps
positions, a small hidden layer adds most of the remaining accuracy, and learned attention queries
pool tokens far better than any fixed rule. Attention over maps was tried on the Fashion-MNIST
example (four queries over a 7×7 grid): its net savings were 13 % at the first exit, where the
grid's were 64 %, and lower than the grid's at every other exit. So were two convolutions of 32 and
64 channels on a 14×14 grid: agreement rose by 0.6 points at the first exit, but the head took 2.3
times as long, so that net savings were 71.6 % instead of 71.8 %, and training took three times as
long.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from offramp.bundle.schema.parts import Head, HeadKind
from offramp.calibration.heads.cut_tensors import CutTensor, Form

FloatArray = NDArray[np.float32]

HIDDEN = 128
"""Width of the hidden layer of a head."""
QUERIES = (1, 4)
"""Numbers of learned attention queries that are tried."""
MAX_FEATURES = 2048
"""Largest number of pooled values of a grid: with more, the hidden layer has over a megabyte of
weights, and a batch of one has to wait until all weights are read."""
FAR_BELOW = -1e9
"""Value added to the scores of padding, so that a softmax ignores it."""


class GraphPart(Protocol):
    """An ONNX graph that a pooling adds its nodes to."""

    def add(self, op: str, inputs: Sequence[str], name: str = "", **attributes: Any) -> str:
        """Add a node with one output; return the output's name."""

    def weight(self, name: str, value: NDArray[Any]) -> str:
        """Add a constant; return its name."""

    def reduce(self, op: str, tensor: str, axis: int, name: str = "") -> str:
        """Add ReduceMax or ReduceMean, without the reduced axis; return the output's name."""


class ServedHead(NamedTuple):
    """A trained head that is made part of a served graph."""

    cut: CutTensor
    head: Head
    weights: Mapping[str, FloatArray]


class Pooling(ABC):
    """Base class of poolings: a kind of head's features, computed in training and in serving."""

    kind: ClassVar[HeadKind]
    form: ClassVar[Form]
    """Form of the cut tensors that this kind can read."""
    reads_mask: ClassVar[bool] = False
    """True if the head also reads the mask, where the model has one."""
    recorded: ClassVar[bool] = False
    """True if the features of this kind are recorded separately, in addition to the tokens."""
    learned: ClassVar[bool] = False
    """True if the pooling has weights, so that training computes it at every step."""

    tried: ClassVar[tuple[Head, ...]] = ()
    """Heads of this kind that are tried on every cut tensor that it can read."""

    def heads(self, cut: CutTensor) -> Sequence[Head]:  # noqa: ARG002
        """Return the heads of this kind that are tried on a cut tensor of known width."""
        return self.tried

    @abstractmethod
    def build(self, part: GraphPart, tensors: Sequence[str], served: ServedHead) -> str:
        """Add the operators that compute features; return their output's name.

        ``tensors`` are those of :attr:`CutTensor.read` as float32.
        """

    def features(self, tokens: FloatArray, keep: FloatArray) -> FloatArray:
        """Pool recorded tokens [n, tokens, width] to [n, features], as the served graph does.

        ``keep`` [n, tokens, 1] is 1 where a token counts, and 0 where it is padding. Other kinds do
        not use this: vectors, grids and joined tensors are recorded as heads read them, and learned
        poolings are computed in training.
        """
        raise NotImplementedError(f"{self.kind} heads are not trained on pooled tokens")


class _GridPooling(Pooling):
    """Averages of a map over the cells of a grid."""

    kind, form = "grid", "map"

    def heads(self, cut: CutTensor) -> Sequence[Head]:
        coarsest, finest = grids_of(cut)[0], grids_of(cut)[-1]
        axes = len(cut.sides)
        cheap = [] if coarsest == finest else [Head(kind="grid", grid=coarsest, axes=axes)]
        return [*cheap, *(Head(kind="grid", grid=finest, axes=axes, hidden=h) for h in (0, HIDDEN))]

    def build(self, part: GraphPart, tensors: Sequence[str], served: ServedHead) -> str:
        (tensor,) = tensors
        return part.add("Flatten", [pool_map(part, served.cut, tensor, served.head.grid)], axis=1)


class _VectorPooling(Pooling):
    """The cut tensor unchanged, if it is a vector."""

    kind, form = "vector", "vector"
    tried = (Head(kind="vector"), Head(kind="vector", hidden=HIDDEN))

    def build(self, part: GraphPart, tensors: Sequence[str], served: ServedHead) -> str:  # noqa: ARG002
        (tensor,) = tensors
        return tensor


class _FirstTokenPooling(Pooling):
    """The first token, which many encoders are trained to answer with."""

    kind, form = "first", "tokens"

    def heads(self, cut: CutTensor) -> Sequence[Head]:
        return () if cut.answers_last else (Head(kind="first"),)

    def features(self, tokens: FloatArray, keep: FloatArray) -> FloatArray:  # noqa: ARG002
        return tokens[:, 0]

    def build(self, part: GraphPart, tensors: Sequence[str], served: ServedHead) -> str:  # noqa: ARG002
        (tensor,) = tensors
        return _first_token(part, tensor)


class _LastTokenPooling(Pooling):
    """The last token that is not padding; it alone sees all others, so decoders answer from it.

    It is tried only on decoders. It is recorded separately: few of the principal components of all
    tokens contain information about the last one's answer.
    """

    kind, form, reads_mask, recorded = "last", "tokens", True, True

    def heads(self, cut: CutTensor) -> Sequence[Head]:
        hidden = (0, HIDDEN) if cut.answers_last else ()
        return [Head(kind="last", hidden=width) for width in hidden]

    def build(self, part: GraphPart, tensors: Sequence[str], served: ServedHead) -> str:
        (tensor,) = tensors
        return last_token(part, tensor, served.cut.mask)


class _MeanPooling(Pooling):
    """Mean of the tokens that are not padding."""

    kind, form, reads_mask = "mean", "tokens", True
    tried = (Head(kind="mean"),)

    def features(self, tokens: FloatArray, keep: FloatArray) -> FloatArray:
        mean: FloatArray = (tokens * keep).sum(axis=1) / np.maximum(keep.sum(axis=1), 1)
        return mean

    def build(self, part: GraphPart, tensors: Sequence[str], served: ServedHead) -> str:
        (tensor,) = tensors
        return _masked_mean(part, tensor, _token_mask(part, served.cut))


class _AttentionPooling(Pooling):
    """Averages of the tokens, weighted by learned attention queries."""

    kind, form, reads_mask, learned = "attention", "tokens", True, True
    tried = (
        *(Head(kind="attention", queries=queries) for queries in QUERIES),
        *(Head(kind="attention", queries=queries, hidden=HIDDEN) for queries in QUERIES),
    )

    def build(self, part: GraphPart, tensors: Sequence[str], served: ServedHead) -> str:
        (tensor,) = tensors
        keep = _token_mask(part, served.cut)
        queries = part.weight("queries", served.weights["queries"].T)
        scores = part.add("MatMul", [tensor, queries])
        if keep is not None:
            scores = part.add("Add", [scores, _padding_bias(part, keep)])
        by_query = part.add("Transpose", [scores], perm=[0, 2, 1])  # [n, queries, tokens]
        attention = part.add("Softmax", [by_query], axis=-1)
        return part.add("Flatten", [part.add("MatMul", [attention, tensor])], axis=1)


class _JoinedPooling(Pooling):
    """The tensors of a set, joined: grid averages of maps, masked means of tokens, vectors."""

    kind, form, reads_mask = "joined", "set", True
    tried = (Head(kind="joined"), Head(kind="joined", hidden=HIDDEN))

    def build(self, part: GraphPart, tensors: Sequence[str], served: ServedHead) -> str:
        return join_tensors(part, tensors, served.cut)


_KINDS = (_GridPooling, _VectorPooling, _FirstTokenPooling, _LastTokenPooling, _MeanPooling,
          _AttentionPooling, _JoinedPooling)  # fmt: skip
POOLINGS: Mapping[HeadKind, Pooling] = {pooling.kind: pooling() for pooling in _KINDS}
"""Every kind of head except "own" and "bridge", by its name in the manifest; tried in this
order."""


def family_of(cut: CutTensor) -> tuple[Head, ...]:
    """Return the heads to try; none if no kind of head reads the tensor's shape."""
    if cut.is_answer or not cut.read:
        return ()
    kinds = [pooling for pooling in POOLINGS.values() if pooling.form == cut.form]
    return tuple(head for pooling in kinds for head in pooling.heads(cut))


def masked_tensors(cut: CutTensor, head: Head) -> tuple[CutTensor, ...]:
    """Return the tensors that a head reads with a mask, one tensor for each mask."""
    if head.kind in ("own", "bridge") or not POOLINGS[head.kind].reads_mask:
        return ()
    by_mask = {tensor.mask: tensor for tensor in cut.read if tensor.mask}
    return tuple(by_mask.values())


def masks_of(cut: CutTensor, head: Head) -> tuple[str, ...]:
    """Return the masks that a head reads in addition to its cut tensors."""
    return tuple(tensor.mask for tensor in masked_tensors(cut, head) if tensor.mask)


def grids_of(cut: CutTensor, most_features: float = MAX_FEATURES) -> tuple[int, ...]:
    """Return the grids that a map is pooled to: 1 × 1, and the finest grid that fits.

    The finest grid has 2, 4, or 7 or 8 cells a side, and at most ``most_features`` features. Grids
    between these two were chosen only at the very end of a model, where their net savings are
    equal.
    """
    sides = [side for side in cut.sides if isinstance(side, int)]
    if len(sides) < len(cut.sides):
        return (1,)
    side = min(sides)
    finest = 7 if side % 7 == 0 else 8
    most = most_features / cut.width
    fitting = [g for g in (1, 2, 4, finest) if g <= side and g ** len(sides) <= most]
    return (1, fitting[-1]) if len(fitting) > 1 else (1,)


def join_tensors(part: GraphPart, tensors: Sequence[str], cut: CutTensor) -> str:
    """Pool each tensor of a set, passed as float32, and join them: [n, features]."""
    pooled = []
    for tensor, described in zip(tensors, cut.read, strict=True):
        match described.own_form:
            case "map":
                grid = grids_of(described, MAX_FEATURES / len(tensors))[-1]
                pooled.append(
                    part.add("Flatten", [pool_map(part, described, tensor, grid)], axis=1)
                )
            case "tokens" if described.answers_last:
                pooled.append(last_token(part, tensor, described.mask))
            case "tokens":
                pooled.append(_masked_mean(part, tensor, _token_mask(part, described)))
            case _:
                pooled.append(tensor)
    return part.add("Concat", pooled, axis=1) if len(pooled) > 1 else pooled[0]


def joined_width(cut: CutTensor) -> int:
    """Return the number of features of :func:`join_tensors`."""
    read = cut.read
    widths = [t.width for t in read]
    cells = [
        grids_of(t, MAX_FEATURES / len(read))[-1] ** len(t.sides) if t.own_form == "map" else 1
        for t in read
    ]
    return sum(width * count for width, count in zip(widths, cells, strict=True))


def pooling_window(size: int, grid: int) -> tuple[int, int]:
    """Return kernel and stride that pool ``size`` to exactly ``grid`` values, covering all.

    Windows do not overlap if ``grid`` divides ``size``. Otherwise windows overlap: a little for
    coarse grids, and much if ``size`` is just below a multiple of a fine grid (15 to 8: windows of
    8).
    """
    stride = size // grid
    return size - (grid - 1) * stride, stride


def pool_map(part: GraphPart, cut: CutTensor, tensor: str, grid: int) -> str:
    """Average-pool a map to [n, channels, grid, ...], with as many sides as the map has."""
    if cut.channel_axis != 1:
        order = [0, cut.rank - 1, *range(1, cut.rank - 1)]
        tensor = part.add("Transpose", [tensor], perm=order)
    if grid == 1:
        return part.add("GlobalAveragePool", [tensor])
    sides = [side for side in cut.sides if isinstance(side, int)]
    assert len(sides) == len(cut.sides)
    if all(side == grid for side in sides):
        return tensor
    windows = [pooling_window(side, grid) for side in sides]
    kernel, strides = ([window[i] for window in windows] for i in (0, 1))
    return part.add("AveragePool", [tensor], kernel_shape=kernel, strides=strides)


def _first_token(part: GraphPart, tokens: str) -> str:
    return part.add("Gather", [tokens, part.weight("first", np.array(0, np.int64))], axis=1)


def last_token(part: GraphPart, tokens: str, mask: str | None, name: str = "") -> str:
    """Pool tokens [n, tokens, width] to the last one where the mask is 1: [n, width].

    Without a mask that is the last token; if the mask is 1 nowhere, the first.
    """
    if mask is None:
        return part.add(
            "Gather", [tokens, part.weight("end", np.array(-1, np.int64))], name, axis=1
        )
    one, zero = (part.weight(f"{n}", np.array(n, np.int64)) for n in (1, 0))
    length = part.add("Gather", [part.add("Shape", [mask]), one])
    places = part.add("Cast", [part.add("Range", [zero, length, one])], to=1)
    # In float32, as not every runtime reduces integers; it is exact up to 16 million.
    counted = part.add("Mul", [part.add("Cast", [mask], to=1), places])
    place = part.add("Cast", [part.reduce("ReduceMax", counted, 1)], to=7)  # INT64
    index = part.add("Unsqueeze", [place, part.weight("axis", np.array([1], np.int64))])
    return part.add("GatherND", [tokens, index], name, batch_dims=1)


def _token_mask(part: GraphPart, cut: CutTensor) -> str | None:
    """Add the mask as float32 [n, tokens, 1]; ``None`` if the model has none."""
    if cut.mask is None:
        return None
    as_float = part.add("Cast", [cut.mask], to=1)  # onnx.TensorProto.FLOAT
    return part.add("Unsqueeze", [as_float, part.weight("last", np.array([2], np.int64))])


def _padding_bias(part: GraphPart, keep: str) -> str:
    """Add the term for scores: negative for padding, 0 for tokens that count."""
    one = part.weight("one", np.array(1, np.float32))
    far = part.weight("far_above", np.array(-FAR_BELOW, np.float32))
    return part.add("Mul", [part.add("Sub", [keep, one]), far])


def _masked_mean(part: GraphPart, tokens: str, keep: str | None) -> str:
    if keep is None:
        return part.reduce("ReduceMean", tokens, 1)
    axis = part.weight("axis", np.array([1], np.int64))
    total = part.add("ReduceSum", [part.add("Mul", [tokens, keep]), axis], keepdims=0)
    count = part.add("ReduceSum", [keep, axis], keepdims=0)
    one = part.weight("one", np.array(1, np.float32))
    return part.add("Div", [total, part.add("Max", [count, one])])
