"""The sandwich rule: one training step of a supernet (Yu & Huang 2019, in-place distillation)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from offramp.supernet.training.supernet import ElasticModule

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Function that returns a scalar from a batch's answers and the targets of these answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandwichLosses:
    """Losses of one step, before the parameters change."""

    largest: float
    """Loss of the largest subnet against the labels."""
    smallest: float
    """Loss of the smallest subnet against the targets."""
    random: tuple[float, ...]
    """Losses of the drawn subnets against the targets."""


def soft_targets(answers: Tensor, largest: Tensor) -> Tensor:
    """Return the cross entropy of logits [batch, classes] against other logits' softmax."""
    return functional.cross_entropy(answers, largest.softmax(1))


def sandwich_step(
    supernet: ElasticModule,
    inputs: Sequence[Tensor],
    labels: Tensor,
    optimiser: torch.optim.Optimizer,
    generator: torch.Generator,
    *,
    drawn: int = 2,
    targets: Tensor | None = None,
    loss: Loss = functional.cross_entropy,
    distillation: Loss = soft_targets,
    bfloat16: bool = False,
    clip: float | None = None,
) -> SandwichLosses:
    """Train the largest subnet on labels; train the smallest and some others on its answers.

    Gradients of all subnets are added, then the optimiser steps once. Afterwards the supernet is
    set to the largest subnet.

    Args:
        supernet: Supernet to train; in training mode.
        inputs: Arguments of its forward pass, each a batch.
        labels: Labels in the form that the loss expects.
        optimiser: Optimiser of the supernet's parameters.
        generator: Random generator of subnets: the same seed draws the same subnets.
        drawn: Number of random subnets in addition to the largest and the smallest.
        targets: Answers of a teacher, for the other subnets; None uses the largest subnet's
        answers.
        loss: Loss of the largest subnet's answers (float32) and the labels.
        distillation: Loss of another subnet's answers and the targets, both float32.
        bfloat16: Compute in bfloat16 where torch considers that safe (autocast on the CPU).
        clip: Largest norm of the gradient; None for no limit.
    """

    def backward(compute: Loss, wanted: Tensor) -> tuple[float, Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            answers = supernet(*inputs)
        found = compute(answers.float(), wanted)
        found.backward()  # type: ignore[no-untyped-call]
        return found.item(), answers.detach().float()

    space = supernet.space
    optimiser.zero_grad(set_to_none=True)
    supernet.choose(space.largest())
    of_largest, answers = backward(loss, labels)
    wanted = answers if targets is None else targets
    others = []
    for choice in (space.smallest(), *(space.random(generator) for _ in range(drawn))):
        supernet.choose(choice)
        others.append(backward(distillation, wanted)[0])
    supernet.choose(space.largest())
    if clip is not None:
        nn.utils.clip_grad_norm_(supernet.parameters(), clip)
    optimiser.step()
    return SandwichLosses(largest=of_largest, smallest=others[0], random=tuple(others[1:]))
