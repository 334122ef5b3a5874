"""A few maps that an exit answered and the model's end too, for the report."""

from __future__ import annotations

from typing import Final

import numpy as np

from offramp.bundle import ExitPolicy
from offramp.calibration.data.dataset import Dataset
from offramp.calibration.data.running import run_over
from offramp.compiler.blueprints.packing import Draft
from offramp.compiler.report.pictures import EarlyMap
from offramp.compiler.samples.staged_answers import AnsweringStages
from offramp.engine.answers.agreement import agreement_of
from offramp.engine.stages.plan import Mode, Plan, plan_stages

LOOKED_AT: Final = 64
"""Samples that those to show are taken from."""
_SHOWN: Final = 4
_MOST_CLASSES: Final = 256


def early_maps(draft: Draft, policy: ExitPolicy, source: bytes, some: Dataset) -> list[EarlyMap]:
    """Take of the samples that leave early some from nearly equal to least equal.

    None where the answer is no map of at most 256 classes, or nobody leaves.
    """
    answer = draft.answer
    if answer.task.kind != "segmentation" or answer.classes > _MOST_CLASSES or not policy.active:
        return []
    stages = plan_stages(draft, draft.read, policy.active)
    plan = Plan(stages=stages, policy_version=policy.version, mode=Mode.LEAVE)
    few = some.subset(np.arange(min(LOOKED_AT, len(some)), dtype=np.intp))
    given = AnsweringStages(plan).run(few.take(slice(None)))
    ((_, (ends,)),) = run_over(source, [answer.output], few, threads=1, batch_size=LOOKED_AT)
    agreement = agreement_of(answer)
    sides = given.answer.shape[-2:]
    early, model = (
        agreement.reduce(values).reshape(-1, *sides).astype(np.uint8)
        for values in (given.answer, ends)
    )
    left = np.flatnonzero(given.exit >= 0)
    equal = (early[left] == model[left]).mean(axis=(1, 2))
    order = left[np.argsort(-equal)]
    places = np.unique(np.linspace(0, len(order) - 1, _SHOWN).round().astype(int))
    return [
        EarlyMap(exit=int(given.exit[row]), early=early[row], end=model[row])
        for row in (order[places] if len(order) else ())
    ]
