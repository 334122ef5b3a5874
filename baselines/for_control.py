"""What baselines add to the controllers that a served model may have: Apparate's."""

from __future__ import annotations

from typing import Final

from offramp.baselines.apparate import ApparateController, ApparateSettings
from offramp.bundle import ExitPolicy
from offramp.engine.control.controller import Controller, ControllerKind
from offramp.engine.control.costs import CostModel


def _apparate(
    policy: ExitPolicy,
    costs: CostModel,
    *,
    max_overhead: float,
    max_disagreement: float,
    confidence_level: float,
) -> Controller:
    settings = ApparateSettings(
        max_overhead=max_overhead,
        max_disagreement=max_disagreement,
        confidence_level=confidence_level,
    )
    return ApparateController(policy, costs, settings)


EXTENSION: Final = (
    ControllerKind(
        name=ApparateController.name,
        description="tunes to the latest samples, as Apparate publishes it; promises nothing",
        make=_apparate,
    ),
)
