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
"""Gives a scalar of a batch's answers and of what they should be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandwichLosses:
    """Losses of one step, before it."""

    largest: float
    """Of the largest subnet against the labels."""
    smallest: float
    """Of the smallest against the targets."""
    random: tuple[float, ...]
    """Of those drawn, likewise."""


def soft_targets(answers: Tensor, largest: Tensor) -> Tensor:
    """Cross entropy of logits [batch, classes] against the probabilities of other logits."""
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
    """Train the largest subnet on labels, and the smallest and some others on its answers.

    Gradients of all subnets are added up, then the optimiser steps once. The supernet computes the
    largest subnet afterwards.

    Args:
        supernet: What to train; in training mode.
        inputs: Its arguments, a batch each.
        labels: As the loss takes them.
        optimiser: Of the supernet's parameters.
        generator: Where subnets are drawn from: the same seed gives the same subnets.
        drawn: How many subnets to draw besides the largest and the smallest.
        targets: Answers of a teacher that the other subnets learn; None for the largest subnet's.
        loss: Of the largest subnet's answers (float32) and the labels.
        distillation: Of another subnet's answers and the targets, both float32.
        bfloat16: Compute in it where torch holds that safe (autocast on the CPU).
        clip: Most norm of the gradient; None for any.
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
