"""Adds the baselines' controllers to the controllers that a served model can use."""

from __future__ import annotations

import math
from typing import Final

from offramp.baselines.apparate import ApparateController, ApparateSettings
from offramp.baselines.pame import PERIOD, PameController, PameSettings
from offramp.calibration.rehearsal.two_stage import StageTimes
from offramp.engine.control.controller import Controller, ControllerKind, ControlTask


def _apparate(task: ControlTask) -> Controller:
    """Return Apparate's controller, started as published (3.1), whatever exits the bundle uses."""
    settings = ApparateSettings(
        max_overhead=task.max_overhead,
        max_disagreement=task.max_disagreement,
        confidence_level=task.confidence_level,
    )
    version = task.policy.version + 1
    return ApparateController.as_published(task.costs, settings, version=version)


def _pame(task: ControlTask) -> Controller:
    """Return PAME's controller, started with the bundle's policy, for the largest batch size.

    If only a share of answers is audited, the period is longer, so that it always contains the same
    number of audited answers. In a shorter period, a single wrong answer, which is weighted for the
    answers that were not audited, would raise thresholds.
    """
    settings = PameSettings(
        batch_size=task.batch_size,
        period=max(math.ceil(PERIOD / task.audit_probability), task.batch_size),
        max_disagreement=task.max_disagreement,
        confidence_level=task.confidence_level,
        audit_probability=task.audit_probability,
    )
    return PameController(task.policy, StageTimes.of(task.manifest, task.profile), settings)


EXTENSION: Final = (
    ControllerKind(
        name=ApparateController.name,
        description="starts without early answers and tunes to the latest samples, as Apparate "
        "publishes it: every sample runs on and the ramp budget is 0.02, in every mode; promises "
        "nothing",
        make=_apparate,
        runs_on=True,
    ),
    ControllerKind(
        name=PameController.name,
        description="evaluates the load repeatedly, as PAME does when it changes: moves exits that "
        "make batches late towards the end, and raises thresholds where answers got worse, never "
        "in the other direction; promises nothing",
        make=_pame,
    ),
)
