"""Adapters: what an exit adds to a state, so that the model's own head reads it rightly.

An adapter is linear, `state + A state + b`, and begins as nothing. Through the frozen norm and LM
head it learns to say what the model says at its end (self-distillation). It is trained on states
with mean 0 and deviation 1 in each number, since a few numbers of a large model's states are a
hundred times as large as the others; the graph has that folded in.
"""

from __future__ import annotations

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from offramp.calibration.torch.torch_graph import TorchGraph
from offramp.compiler.graphs.graph import default_opset
from offramp.generation.bundle.tensor_names import LOGITS, NEXT_STATE, STATE
from offramp.generation.training.exit_samples import ExitSamples, ExitTraining, TrainedExit
from offramp.generation.training.fitting import Examples, TokenLesson, fit, moments

_FULL_WIDTH = 512
"""Widest state that has a whole matrix by default, which costs a twelfth of a usual layer."""
_RANK_SHARE = 8
"""Width of wider states by the default rank."""


class LinearAdapter(nn.Module):
    """The adapter in torch: states [n, width] to states [n, width]."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, states: NDArray[np.float32], rank: int | None, seed: int) -> None:
        """Begin as identity, for states like these; ``rank`` ``None`` follows from the width."""
        super().__init__()
        width = states.shape[1]
        if rank is None and width > _FULL_WIDTH:
            rank = width // _RANK_SHARE
        mean, deviation = moments(states)
        self.register_buffer("mean", torch.from_numpy(mean).float())
        self.register_buffer("deviation", torch.from_numpy(deviation).float())
        self.down: nn.Parameter | None = None
        inner = width
        if rank is not None and rank < width:
            random = torch.Generator().manual_seed(seed)
            self.down = nn.Parameter(torch.randn(width, rank, generator=random))
            inner = rank
        self.up, self.bias = (
            nn.Parameter(torch.zeros(inner, width)),
            nn.Parameter(torch.zeros(width)),
        )

    def forward(self, states: Tensor) -> Tensor:
        """Return states to be read by the head."""
        normal = (states - self.mean) / self.deviation
        if self.down is not None:
            normal = normal @ self.down / len(self.down) ** 0.5
        # Divided by the root, a step of the learning rate changes states of any width as much.
        moved: Tensor = normal @ self.up / len(self.up) ** 0.5 + self.bias
        return states + moved * self.deviation

    def nodes(self, read: str, written: str) -> tuple[list[onnx.NodeProto], list[TensorProto]]:
        """Return operators and weights from one tensor, [..., width], to another."""
        mean, deviation, up, bias = (
            t.detach().double().numpy() for t in (self.mean, self.deviation, self.up, self.bias)
        )
        up = up / len(up) ** 0.5 * deviation
        if self.down is None:
            matrix = up / deviation[:, None]
            factors = [matrix + np.eye(len(bias))]
        else:
            down = self.down.detach().double().numpy() / len(deviation) ** 0.5
            down = down / deviation[:, None]
            matrix, factors = down @ up, [down, up]
        factors += [bias * deviation - mean @ matrix]
        names = [f"adapter/weight_{place}" for place in range(len(factors) - 1)] + ["adapter/bias"]
        nodes, last = [], read
        for place, name in enumerate(names[:-1]):
            nodes.append(helper.make_node("MatMul", [last, name], [f"adapter/{place}"]))
            last = f"adapter/{place}"
        if self.down is not None:
            nodes.append(helper.make_node("Add", [read, last], ["adapter/sum"]))
            last = "adapter/sum"
        nodes.append(helper.make_node("Add", [last, "adapter/bias"], [written]))
        for node in nodes:
            node.name = node.output[0]
        weights = [
            numpy_helper.from_array(values.astype(np.float32), name)
            for values, name in zip(factors, names, strict=True)
        ]
        return nodes, weights


class _Adapted(nn.Module):
    """The adapter, and the model's head behind it."""

    def __init__(self, adapter: LinearAdapter, logits: onnx.ModelProto) -> None:
        super().__init__()
        self.adapter, self.head = adapter, TorchGraph(logits)
        self.head.requires_grad_(requires_grad=False)

    def forward(self, states: Tensor) -> Tensor:
        found: Tensor = self.head({STATE: self.adapter(states)[:, None]})[LOGITS][:, 0]
        return found


def train_adapter(
    samples: ExitSamples,
    tuning: ExitSamples,
    logits: onnx.ModelProto,
    *,
    rank: int | None = None,
    options: ExitTraining,
) -> TrainedExit:
    """Train an adapter of an exit; its graph is `state` to `next_state`, [n, tokens, width].

    Args:
        samples: Tokens that are learned.
        tuning: Tokens by which training ends.
        logits: The model's norm and LM head, as ``text_graphs.logits_graph`` makes it.
        rank: Of the matrix that is added; the default is all of it for states of up to 512 numbers,
            and an eighth of the width for wider ones.
        options: How long and how fast.

    Raises:
        UntrainableError: ``logits`` has operators that are lacking in torch.
    """
    adapter = LinearAdapter(samples.states, rank, options.seed)
    before, after = fit(
        _Adapted(adapter, logits),
        TokenLesson(),
        Examples(samples.states, samples.tokens),
        Examples(tuning.states, tuning.tokens),
        options=options,
    )
    nodes, weights = adapter.nodes(STATE, NEXT_STATE)
    shape: list[str | int] = ["batch", "tokens", samples.width]
    given, made = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name in (STATE, NEXT_STATE)
    )
    graph = helper.make_graph(nodes, "adapter", [given], [made], weights)
    versions = [helper.make_opsetid("", default_opset(logits))]
    model = helper.make_model(graph, opset_imports=versions, ir_version=logits.ir_version)
    return TrainedExit(graph=model, before=before, after=after)
