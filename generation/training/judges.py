"""Judges: classifiers of a state that predict whether the exit's token is the model's.

CALM 3.5 has a linear classifier of the state, trained separately from the model. Here the
classifier reads the state with mean 0 and deviation 1, so that the scale of a state, which grows
from layer to layer, has no influence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn
from torch.nn import functional

from offramp.certify.decision import BoolArray
from offramp.generation.bundle.tensor_names import CONFIDENCE, STATE
from offramp.generation.training.exit_samples import ExitSamples, ExitTraining, TrainedExit
from offramp.generation.training.fitting import Examples, fit

_OPSET, _IR_VERSION = 17, 8
_EPSILON = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedJudge(TrainedExit):
    """A graph from `state` to `confidence`, float32 [n]."""

    ranked: float
    """Area under the ROC curve: the probability that the confidence is higher for a tuning token on
    which exit and model agree than for one on which they differ; 0.5 is no information."""


class _Judge(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(1))

    def forward(self, states: Tensor) -> Tensor:
        normal = functional.layer_norm(states, states.shape[-1:], eps=_EPSILON)
        found: Tensor = normal @ self.weight / len(self.weight) ** 0.5 + self.bias
        return found


class _Balanced:
    """Lesson to predict whether the exit agrees with the model.

    Agreement and disagreement have the same total weight, however rare one of them is.
    """

    def __init__(self, agrees: BoolArray) -> None:
        share = float(
            np.clip(agrees.mean(), 1 / (len(agrees) + 1), len(agrees) / (len(agrees) + 1))
        )
        self._weights = torch.tensor([0.5 / (1 - share), 0.5 / share])

    def losses(self, scores: Tensor, targets: Tensor) -> Tensor:
        each = functional.binary_cross_entropy_with_logits(
            scores, targets.float(), reduction="none"
        )
        return each * self._weights[targets.long()]

    def right(self, scores: Tensor, targets: Tensor) -> Tensor:
        return (scores > 0) == targets


def train_judge(
    samples: ExitSamples,
    tuning: ExitSamples,
    *,
    agrees: BoolArray,
    tuning_agrees: BoolArray,
    options: ExitTraining,
) -> TrainedJudge:
    """Train a judge of an exit.

    ``agrees`` and ``tuning_agrees``, bool [tokens], are true for tokens that the exit predicts like
    the model. The judge's graph reads ``state``, [n, 1, width], as it is before the exit's adapter.
    Train judge and adapter on different prompts, because the adapter agrees more often on prompts
    that it learned.
    """
    judge = _Judge(samples.width)
    before, after = fit(
        judge,
        _Balanced(agrees),
        Examples(samples.states, agrees),
        Examples(tuning.states, tuning_agrees),
        options=options,
    )
    with torch.no_grad():
        found = [judge(torch.from_numpy(np.array(part))).numpy() for part in _parts(tuning.states)]
    return TrainedJudge(
        graph=_graph(judge),
        before=before,
        after=after,
        ranked=rank_chance(np.concatenate(found), tuning_agrees),
    )


def _parts(states: NDArray[np.float32]) -> list[NDArray[np.float32]]:
    return [states[start : start + 4096] for start in range(0, len(states), 4096)]


def rank_chance(scores: NDArray[np.floating], which: BoolArray) -> float:
    """Return the probability that a token in ``which`` scores above a token outside of it.

    Ties count half. The result is 0.5 if all tokens, or none, are in ``which``.
    """
    values, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    del values
    last = np.cumsum(counts)
    ranks = (last - (counts - 1) / 2)[places]
    ones, zeros = int(which.sum()), int((~which).sum())
    if not ones or not zeros:
        return 0.5
    return float((ranks[which].sum() - ones * (ones + 1) / 2) / (ones * zeros))


def _graph(judge: _Judge) -> onnx.ModelProto:
    width = len(judge.weight)
    weights: dict[str, NDArray[Any]] = {
        "judge/ones": np.ones(width, np.float32),
        "judge/weight": judge.weight.detach().numpy()[:, None] / np.float32(width**0.5),
        "judge/bias": judge.bias.detach().numpy(),
        "judge/shape": np.array([-1], np.int64),
    }
    steps: list[tuple[str, list[str], str, dict[str, Any]]] = [
        ("LayerNormalization", [STATE, "judge/ones"], "judge/normal", {"epsilon": _EPSILON}),
        ("MatMul", ["judge/normal", "judge/weight"], "judge/product", {}),
        ("Add", ["judge/product", "judge/bias"], "judge/sum", {}),
        ("Sigmoid", ["judge/sum"], "judge/chance", {}),
        ("Reshape", ["judge/chance", "judge/shape"], CONFIDENCE, {}),
    ]
    graph = helper.make_graph(
        [helper.make_node(k, reads, [to], name=to, **given) for k, reads, to, given in steps],
        "judge",
        [helper.make_tensor_value_info(STATE, TensorProto.FLOAT, ["batch", 1, width])],
        [helper.make_tensor_value_info(CONFIDENCE, TensorProto.FLOAT, ["batch"])],
        [numpy_helper.from_array(values, name) for name, values in weights.items()],
    )
    versions = [helper.make_opsetid("", _OPSET)]
    return helper.make_model(graph, opset_imports=versions, ir_version=_IR_VERSION)
