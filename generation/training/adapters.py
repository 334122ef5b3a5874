"""Adapters, which change a state so that the model's own head can read it at an exit.

An adapter has one hidden layer, `state + B relu(A state + a) + b`, and starts as the identity.
Through the frozen norm and LM head it learns to predict the model's final token
(self-distillation). A linear adapter agreed with the model on fewer tokens: 70.5 %, instead of 74.7
%, after layer 2 of the text normaliser's 8 layers.

It is trained on states with mean 0 and deviation 1 in each component, since a few components of a
large model's states are a hundred times as large as the others; the graph includes the scaling.
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
"""Largest width of states for which the default hidden layer has the width of the states. A hidden
layer of this width costs a sixth of a usual decoder layer."""
_SHARE = 4
"""Default width of the hidden layer for wider states: the width of the states divided by this
number."""


class ResidualAdapter(nn.Module):
    """The adapter in torch: states [n, width] to states [n, width]."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, states: NDArray[np.float32], hidden: int | None, seed: int) -> None:
        """Start as the identity for these states; by default ``hidden`` depends on their width."""
        super().__init__()
        width = states.shape[1]
        if hidden is None:
            hidden = width if width <= _FULL_WIDTH else width // _SHARE
        mean, deviation = moments(states)
        self.register_buffer("mean", torch.from_numpy(mean).float())
        self.register_buffer("deviation", torch.from_numpy(deviation).float())
        random = torch.Generator().manual_seed(seed)
        self.down = nn.Parameter(torch.randn(width, hidden, generator=random))
        self.down_bias = nn.Parameter(torch.zeros(hidden))
        self.up = nn.Parameter(torch.zeros(hidden, width))
        self.up_bias = nn.Parameter(torch.zeros(width))

    def forward(self, states: Tensor) -> Tensor:
        """Return the adapted states, for the head."""
        normal = (states - self.mean) / self.deviation
        # Division by square roots: so one learning rate changes states of any width equally.
        inner = torch.relu(normal @ self.down / len(self.down) ** 0.5 + self.down_bias)
        moved: Tensor = inner @ self.up / len(self.up) ** 0.5 + self.up_bias
        return states + moved * self.deviation

    def nodes(self, read: str, written: str) -> tuple[list[onnx.NodeProto], list[TensorProto]]:
        """Return the operators and weights that compute tensor ``written`` from ``read``."""
        mean, deviation, down, down_bias, up, up_bias = (
            tensor.detach().double().numpy()
            for tensor in (
                self.mean, self.deviation, self.down, self.down_bias, self.up, self.up_bias
            )
        )  # fmt: skip
        down = down / len(down) ** 0.5 / deviation[:, None]
        weights = {
            "adapter/down": down,
            "adapter/down_bias": down_bias - mean @ down,
            "adapter/up": up / len(up) ** 0.5 * deviation,
            "adapter/up_bias": up_bias * deviation,
        }
        steps = [
            ("MatMul", [read, "adapter/down"], "adapter/product"),
            ("Add", ["adapter/product", "adapter/down_bias"], "adapter/sum"),
            ("Relu", ["adapter/sum"], "adapter/hidden"),
            ("MatMul", ["adapter/hidden", "adapter/up"], "adapter/moved"),
            ("Add", ["adapter/moved", "adapter/up_bias"], "adapter/change"),
            ("Add", [read, "adapter/change"], written),
        ]
        return (
            [helper.make_node(kind, reads, [to], name=to) for kind, reads, to in steps],
            [numpy_helper.from_array(v.astype(np.float32), name) for name, v in weights.items()],
        )


class _Adapted(nn.Module):
    """The adapter, followed by the model's head."""

    def __init__(self, adapter: ResidualAdapter, logits: onnx.ModelProto) -> None:
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
    hidden: int | None = None,
    options: ExitTraining,
) -> TrainedExit:
    """Train an adapter of an exit; its graph is `state` to `next_state`, [n, tokens, width].

    Args:
        samples: Tokens to learn.
        tuning: Tokens that decide when training ends.
        logits: The model's norm and LM head, made by ``text_graphs.logits_graph``.
        hidden: Size of the adapter's hidden layer; by default the width of the states up to 512,
            and a quarter of it for wider ones.
        options: Length and speed of the training.

    Raises:
        UntrainableError: ``logits`` has operators that are missing in torch.
    """
    adapter = ResidualAdapter(samples.states, hidden, options.seed)
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
