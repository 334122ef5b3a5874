"""Whole layers: matrix products and attention, normalisation, recurrent layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from offramp.calibration.torch_operators.node import GraphNode, TorchOperator, operator, padded


def _gemm(node: GraphNode, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    a = a.T if node.get("transA", 0) else a
    b = b.T if node.get("transB", 0) else b
    alpha, beta = node.get("alpha", 1.0), node.get("beta", 1.0)
    if not a.is_floating_point():
        alpha, beta = int(alpha), int(beta)
    if c is not None and c.is_floating_point():
        return torch.addmm(c, a, b, beta=beta, alpha=alpha)
    product = a @ b * alpha
    return product if c is None else product + c * beta


def _einsum(node: GraphNode, *inputs: Tensor) -> Tensor:
    return torch.einsum(node.get("equation", ""), *inputs)


def _attention(
    node: GraphNode, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Attend in heads: [b, heads, tokens, width], or [b, tokens, heads * width] to be split."""
    flat = query.ndim == 3
    if flat:
        heads = node.get("q_num_heads", 1), *([node.get("kv_num_heads", 1)] * 2)
        query, key, value = (
            x.reshape(*x.shape[:2], count, -1).transpose(1, 2)
            for x, count in zip((query, key, value), heads, strict=True)
        )
    shared = query.shape[1] // key.shape[1]  # heads of queries that share one of keys
    key, value = (x.repeat_interleave(shared, 1) if shared > 1 else x for x in (key, value))
    scale = node.get("scale", 1 / math.sqrt(query.shape[-1]))
    scores = (query * math.sqrt(scale)) @ (key * math.sqrt(scale)).transpose(-1, -2)
    cap = node.get("softcap", 0.0)
    if cap:
        scores = torch.tanh(scores / cap) * cap
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask
    if node.get("is_causal", 0):
        tokens = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        scores = scores.masked_fill(~tokens.tril(), -math.inf)
    # a token that may see none gets zeros, and neither it nor its gradient is NaN
    blind = torch.isneginf(scores).all(-1, keepdim=True)
    weights = scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)
    attended = weights.to(value.dtype) @ value
    return attended.transpose(1, 2).flatten(2) if flat else attended


_KNOWN = {"is_causal", "kv_num_heads", "q_num_heads", "scale", "softcap"}
_WITHOUT_EFFECT = {"qk_matmul_output_mode", "softmax_precision"}


def _attention_lacks(node: GraphNode) -> str | None:
    other = sorted(node.attributes.keys() - _KNOWN - _WITHOUT_EFFECT)
    if other:
        return f"with {', '.join(other)}"
    if any(node.reads(index) for index in (4, 5, 6)):
        return "with past keys, past values or lengths"
    if any(node.writes(index) for index in (1, 2, 3)):
        return "with more outputs than the attended values"
    return None


def _rotary_embedding(
    node: GraphNode, x: Tensor, cosines: Tensor, sines: Tensor, places: Tensor | None = None
) -> Tensor:
    """Turn pairs of coordinates by angles of their place; [b, heads, tokens, width] or as above."""
    flat = x.ndim == 3
    if flat:
        x = x.reshape(*x.shape[:2], node.get("num_heads", 1), -1).transpose(1, 2)
    turned = node.get("rotary_embedding_dim", 0) or x.shape[-1]
    if places is not None:
        cosines, sines = cosines[places], sines[places]
    cosines, sines = (table[:, None, :, : turned // 2] for table in (cosines, sines))
    paired = node.get("interleaved", 0)
    moved, rest = x[..., :turned], x[..., turned:]
    first, second = (moved[..., ::2], moved[..., 1::2]) if paired else moved.chunk(2, -1)
    real, imaginary = first * cosines - second * sines, first * sines + second * cosines
    if paired:
        joined = torch.stack([real, imaginary], -1).flatten(-2)
    else:
        joined = torch.cat([real, imaginary], -1)
    y = torch.cat([joined, rest], -1)
    return y.transpose(1, 2).flatten(2) if flat else y


PRODUCTS: Mapping[str, TorchOperator] = {
    "Attention": operator(_attention, lacks=_attention_lacks),
    "Einsum": operator(_einsum),
    "Gemm": operator(_gemm),
    "MatMul": operator(lambda _, a, b: a @ b),
    "RotaryEmbedding": operator(_rotary_embedding),
}


def _batch_norm(
    node: GraphNode, x: Tensor, scale: Tensor, bias: Tensor, *statistics: Tensor
) -> Tensor:
    """Normalise by the statistics that the graph has, whatever the batch's own are."""
    mean, variance = statistics
    eps = node.get("epsilon", 1e-5)
    if not (mean.requires_grad or variance.requires_grad):
        return functional.batch_norm(x, mean, variance, scale, bias, eps=eps)
    # torch has no gradients of statistics
    shape = (-1, *([1] * (x.ndim - 2)))
    factor = scale * torch.rsqrt(variance + eps)
    return x * factor.reshape(shape) + (bias - mean * factor).reshape(shape)


def _batch_norm_lacks(node: GraphNode) -> str | None:
    """Statistics of the batch make a sample's answer hang on its neighbours."""
    if node.get("training_mode", 0):
        return "in training mode; export the model with model.eval()"
    return None


def _instance_norm(node: GraphNode, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    axes = tuple(range(2, x.ndim))
    shape = (-1, *([1] * len(axes)))
    variance, mean = torch.var_mean(x, axes, correction=0, keepdim=True)
    normal = (x - mean) * torch.rsqrt(variance + node.get("epsilon", 1e-5))
    return normal * scale.reshape(shape) + bias.reshape(shape)


def _layer_norm(
    node: GraphNode, x: Tensor, scale: Tensor, bias: Tensor | None = None
) -> list[Tensor]:
    """Normalise over the axes from one on; mean and inverse deviation are further outputs."""
    axis, eps = node.get("axis", -1) % x.ndim, node.get("epsilon", 1e-5)
    sizes = x.shape[axis:]
    whole = scale.shape == sizes and (bias is None or bias.shape == sizes)
    if whole and not (node.writes(1) or node.writes(2)):
        return [functional.layer_norm(x, sizes, scale, bias, eps)]
    axes = tuple(range(axis, x.ndim))
    variance, mean = torch.var_mean(x.float(), axes, correction=0, keepdim=True)
    inverse = torch.rsqrt(variance + eps)
    normal = ((x.float() - mean) * inverse).to(x.dtype) * scale
    return [normal if bias is None else normal + bias, mean, inverse]


def _rms_norm(node: GraphNode, x: Tensor, scale: Tensor) -> Tensor:
    axis = node.get("axis", -1) % x.ndim
    wide = x if x.dtype == torch.float64 else x.float()
    square = wide.square().mean(tuple(range(axis, x.ndim)), keepdim=True)
    return (wide * torch.rsqrt(square + node.get("epsilon", 1e-5))).to(x.dtype) * scale


def _group_norm(node: GraphNode, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Normalise groups of channels; scales were one a group before opset 21."""
    groups = node.get("num_groups", 1)
    if len(scale) != x.shape[1]:
        scale, bias = (each.repeat_interleave(x.shape[1] // groups) for each in (scale, bias))
    return functional.group_norm(x, groups, scale, bias, node.get("epsilon", 1e-5))


def _local_response(node: GraphNode, x: Tensor) -> Tensor:
    """Divide by the squares of neighbouring channels."""
    size = node.get("size", 1)
    front, behind = (size - 1) // 2, size - 1 - (size - 1) // 2
    flat = x.square().reshape(len(x), 1, x.shape[1], -1)
    summed = functional.avg_pool2d(functional.pad(flat, (0, 0, front, behind)), (size, 1), 1)
    # the mean of the window is its sum by the size, as ONNX divides alpha
    base = node.get("bias", 1.0) + node.get("alpha", 1e-4) * summed.reshape(x.shape)
    return x / base ** node.get("beta", 0.75)


def _lp_norm(node: GraphNode, x: Tensor) -> Tensor:
    axis = node.get("axis", -1)
    length = torch.linalg.vector_norm(x, node.get("p", 2), axis, keepdim=True)
    return torch.where(length == 0, torch.zeros_like(x), x / length)


def _mean_variance(node: GraphNode, x: Tensor) -> Tensor:
    variance, mean = torch.var_mean(x, node.get("axes", (0, 2, 3)), correction=0, keepdim=True)
    return (x - mean) / (variance.sqrt() + 1e-9)


NORMALISATION: Mapping[str, TorchOperator] = {
    "BatchNormalization": operator(_batch_norm, untrained=(3, 4), lacks=_batch_norm_lacks),
    "GroupNormalization": operator(_group_norm),
    "InstanceNormalization": operator(_instance_norm),
    "LRN": operator(_local_response),
    "LayerNormalization": operator(_layer_norm),
    "LpNormalization": operator(_lp_norm),
    "MeanVarianceNormalization": operator(_mean_variance),
    "RMSNormalization": operator(_rms_norm),
}


_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "softplus": functional.softplus,
    "softsign": functional.softsign,
    "tanh": torch.tanh,
}
"""Those without numbers of their own, by their names in small letters."""
_DEFAULTS = {"RNN": ("Tanh",), "GRU": ("Sigmoid", "Tanh"), "LSTM": ("Sigmoid", "Tanh", "Tanh")}

_State = tuple[Tensor, ...]
"""The hidden state [b, hidden], and of an LSTM the cell state behind it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Layer:
    """One direction of a recurrent layer."""

    weight: Tensor
    """[gates * hidden, width]."""
    recurrent: Tensor
    """[gates * hidden, hidden]."""
    bias: Tensor
    """[2, gates * hidden]: of the input, and of the state."""
    peepholes: Tensor | None
    """[3 * hidden], of an LSTM."""
    activations: Sequence[Callable[[Tensor], Tensor]]
    clip: float
    before_reset: bool
    """Whether a GRU multiplies the state before it is reset."""
    coupled: bool
    """Whether what an LSTM lets in is what it forgets."""


def _rnn_step(layer: _Layer, x: Tensor, state: _State) -> _State:
    (h,) = state
    summed = x + h @ layer.recurrent.T + layer.bias[1]
    return (layer.activations[0](_clipped(summed, layer.clip)),)


def _gru_step(layer: _Layer, x: Tensor, state: _State) -> _State:
    (h,) = state
    x_update, x_reset, x_new = x.chunk(3, 1)
    r_update, r_reset, r_new = layer.recurrent.chunk(3, 0)
    b_update, b_reset, b_new = layer.bias[1].chunk(3)
    f, g = layer.activations
    update = f(_clipped(x_update + h @ r_update.T + b_update, layer.clip))
    reset = f(_clipped(x_reset + h @ r_reset.T + b_reset, layer.clip))
    before = layer.before_reset
    inner = reset * (h @ r_new.T + b_new) if before else (reset * h) @ r_new.T + b_new
    new = g(_clipped(x_new + inner, layer.clip))
    return ((1 - update) * new + update * h,)


def _lstm_step(layer: _Layer, x: Tensor, state: _State) -> _State:
    h, c = state
    f, g, last = layer.activations
    into, out, forget, new = (x + h @ layer.recurrent.T + layer.bias[1]).chunk(4, 1)
    peep_in = peep_out = peep_forget = None
    if layer.peepholes is not None:
        peep_in, peep_out, peep_forget = layer.peepholes.chunk(3)
        into, forget = into + peep_in * c, forget + peep_forget * c
    into = f(_clipped(into, layer.clip))
    forget = 1 - into if layer.coupled else f(_clipped(forget, layer.clip))
    c = forget * c + into * g(_clipped(new, layer.clip))
    if peep_out is not None:
        out = out + peep_out * c
    return f(_clipped(out, layer.clip)) * last(c), c


_STEPS = {"RNN": _rnn_step, "GRU": _gru_step, "LSTM": _lstm_step}


def _clipped(x: Tensor, bound: float) -> Tensor:
    return x.clamp(-bound, bound) if bound else x


def _recurrent(
    node: GraphNode, x: Tensor, weight: Tensor, recurrent: Tensor, *rest: Tensor | None
) -> list[Tensor]:
    """Run a layer over [tokens, b, width], or [b, tokens, width] with ``layout``.

    Gives all hidden states [tokens, directions, b, hidden] and the last ones of each kind.
    """
    batch_first = bool(node.get("layout", 0))
    x = x.transpose(0, 1) if batch_first else x
    kinds = 2 if node.kind == "LSTM" else 1
    bias, lengths, *others = padded(rest, 5)
    states = []
    for given in others[:kinds]:
        if given is None:
            states.append(x.new_zeros(len(weight), x.shape[1], recurrent.shape[-1]))
        else:
            states.append(given.transpose(0, 1) if batch_first else given)
    peepholes = others[2] if kinds == 2 else None
    reverse = {"forward": (False,), "reverse": (True,)}.get(
        node.get("direction", "forward"), (False, True)
    )
    outputs, lasts = [], []
    layers = _layers(node, weight, recurrent, bias=bias, peepholes=peepholes)
    for index, (layer, backward) in enumerate(zip(layers, reverse, strict=True)):
        first = tuple(state[index] for state in states)
        hidden, last = _run(_STEPS[node.kind], layer, x, first, lengths, backward=backward)
        outputs.append(hidden)
        lasts.append(last)
    hidden = torch.stack(outputs, 1)
    ends = [torch.stack([last[kind] for last in lasts]) for kind in range(kinds)]
    if batch_first:
        hidden, ends = hidden.permute(2, 0, 1, 3), [end.transpose(0, 1) for end in ends]
    return [hidden, *ends]


def _layers(
    node: GraphNode,
    weight: Tensor,
    recurrent: Tensor,
    *,
    bias: Tensor | None,
    peepholes: Tensor | None,
) -> Iterator[_Layer]:
    """Give the layer of each direction."""
    names, count = _names(node), len(_DEFAULTS[node.kind])
    for index in range(len(weight)):
        both = weight.new_zeros(2 * weight.shape[1]) if bias is None else bias[index]
        yield _Layer(
            weight=weight[index],
            recurrent=recurrent[index],
            bias=both.reshape(2, -1),
            peepholes=None if peepholes is None else peepholes[index],
            activations=[_ACTIVATIONS[n] for n in names[index * count : (index + 1) * count]],
            clip=node.get("clip", 0.0),
            before_reset=bool(node.get("linear_before_reset", 0)),
            coupled=bool(node.get("input_forget", 0)),
        )


def _run(
    step: Callable[[_Layer, Tensor, _State], _State],
    layer: _Layer,
    x: Tensor,
    state: _State,
    lengths: Tensor | None,
    *,
    backward: bool,
) -> tuple[Tensor, _State]:
    """Go over the tokens; those behind a sequence's end change no state and answer with zeros.

    So a sequence that is read backward begins at its own last token.
    """
    projected = x @ layer.weight.T + layer.bias[0]
    found: list[Tensor] = []
    tokens = range(len(x))
    for token in reversed(tokens) if backward else tokens:
        new = step(layer, projected[token], state)
        if lengths is None:
            state = new
            found.append(new[0])
            continue
        inside = (token < lengths)[:, None]
        state = tuple(torch.where(inside, n, s) for n, s in zip(new, state, strict=True))
        found.append(torch.where(inside, new[0], torch.zeros_like(new[0])))
    return torch.stack(found[::-1] if backward else found), state


def _names(node: GraphNode) -> list[str]:
    directions = 2 if node.get("direction", "forward") == "bidirectional" else 1
    default = _DEFAULTS[node.kind] * directions
    return [name.lower() for name in node.get("activations", default)]


def _recurrent_lacks(node: GraphNode) -> str | None:
    other = [name for name in _names(node) if name not in _ACTIVATIONS]
    return f"with the activation {other[0]}" if other else None


RECURRENT: Mapping[str, TorchOperator] = {
    kind: operator(_recurrent, lacks=_recurrent_lacks) for kind in _STEPS
}
