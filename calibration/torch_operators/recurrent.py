"""Recurrent layers, step by step: LSTM, GRU and RNN, forward, backward, or both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from offramp.calibration.torch_operators.node import GraphNode, TorchOperator, operator, padded

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
