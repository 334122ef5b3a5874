"""The controllers that are compared, made afresh for every sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from benchmarks.adapt.replay import ComparedController

from offramp.baselines.apparate import ApparateController, ApparateSettings
from offramp.baselines.pame import PameController, PameSettings
from offramp.baselines.thresholds import (
    Tuning,
    always_active,
    tune_separate,
    tune_shared,
)
from offramp.bundle import Bundle, ExitPolicy
from offramp.bundle.records import TUNE
from offramp.calibration.rehearsal.two_stage import StageTimes
from offramp.certify import Records
from offramp.engine.control.controller import Controller
from offramp.engine.control.costs import CostModel
from offramp.engine.control.static import StaticController
from offramp.engine.models.controllers import make_controller, ramp_budget
from offramp.engine.models.options import ModelOptions, added_controllers
from offramp.engine.stages.plan import Mode
from offramp.tools.bench.common.bench_flags import look_up


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerInputs:
    """The bundle and the limits that every compared controller is made from."""

    bundle: Bundle
    batch_size: int
    costs: CostModel
    """Predicted costs of the exits at ``batch_size``."""
    max_disagreement: float
    confidence_level: float
    ramp_budget: float | None
    """Largest relative delay of the model's end that exits may cause when the controller changes
    the exits in use. ``None`` means 2 % in release mode, as Apparate publishes it, and otherwise
    the delay of the bundle's own exits."""
    audit_budget: float
    """Share of compute that audits may take."""

    def options(self, controller: str) -> ModelOptions:
        """Return the options with which a server would run a controller."""
        return ModelOptions(
            max_batch_size=self.batch_size,
            controller=controller,
            max_disagreement=self.max_disagreement,
            confidence=self.confidence_level,
            audit_budget=self.audit_budget,
            ramp_budget=self.ramp_budget,
        )

    def tuning_records(self) -> Records:
        """Return the tuning split's records of all exits, as if each exit was in use."""
        records = self.bundle.records()
        rows = records["split"] == TUNE
        return Records.of(
            records["confidence"][:, rows],
            (records["prediction"] == records["final_prediction"])[:, rows],
            self.costs.latency_ms(range(self.costs.exits)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of controller: its description, its mode, and the function that makes it."""

    description: str
    mode: Mode
    make: Callable[[ControllerInputs], Controller]


def contenders_of(names: Sequence[str]) -> dict[str, Kind]:
    """Return the kinds with these names, ``all`` for every kind; ValueError for an unknown name."""
    return look_up("controller", KINDS if tuple(names) == ("all",) else names, KINDS)


def make_contender(name: str, workplace: ControllerInputs) -> ComparedController:
    """Return a new controller of the kind ``name``."""
    kind = KINDS[name]
    return ComparedController(
        label=name, description=kind.description, controller=kind.make(workplace), mode=kind.mode
    )


def _fixed(workplace: ControllerInputs, policy: ExitPolicy) -> Controller:
    return StaticController(
        policy,
        max_disagreement=workplace.max_disagreement,
        confidence_level=workplace.confidence_level,
    )


def _static(workplace: ControllerInputs, tune: Callable[[Records, float], Tuning]) -> Controller:
    tuned = tune(workplace.tuning_records(), workplace.max_disagreement)
    return _fixed(workplace, always_active(tuned.thresholds))


def _apparate(workplace: ControllerInputs, window: int) -> Controller:
    """Return Apparate's controller as served, except that it tunes on ``window`` samples."""
    options = workplace.options("apparate")
    settings = ApparateSettings(
        max_disagreement=workplace.max_disagreement,
        confidence_level=workplace.confidence_level,
        max_overhead=ramp_budget(
            workplace.bundle.policy, workplace.costs, options, all_run_on=True
        ),
        tuning_window=window,
    )
    return ApparateController.as_published(workplace.costs, settings)


def _pame(workplace: ControllerInputs) -> Controller:
    """Return PAME's controller, which only raises thresholds; feedback avoids needless rises."""
    settings = PameSettings(
        max_disagreement=workplace.max_disagreement,
        confidence_level=workplace.confidence_level,
        batch_size=workplace.batch_size,
    )
    bundle = workplace.bundle
    times = StageTimes.of(bundle.manifest, bundle.profile())
    return PameController(bundle.policy, times, settings)


def _served(workplace: ControllerInputs, name: str, mode: Mode) -> Controller:
    """Return a controller as the server makes it."""
    options = workplace.options(name)
    controller, _ = make_controller(workplace.bundle, workplace.bundle.profile(), mode, options)
    return controller


def added_kinds() -> dict[str, Kind]:
    """Return the controllers of extensions, as served: ``NAME`` in audit mode, ``NAME-release``."""
    modes = {"": Mode.AUDIT, "-release": Mode.RELEASE}
    return {
        name + suffix: Kind(
            description=kind.description, mode=mode, make=partial(_served, name=name, mode=mode)
        )
        for name, kind in added_controllers().items()
        if name not in _OWN
        for suffix, mode in modes.items()
    }


_OWN: Final[Mapping[str, Kind]] = {
    "leave": Kind(
        description="the bundle's policy, as compiled and certified; nothing is observed",
        mode=Mode.LEAVE,
        make=lambda workplace: _fixed(workplace, workplace.bundle.policy),
    ),
    "static-shared": Kind(
        description="all exits, one threshold tuned once on the bundle's tuning split "
        "(BranchyNet, DeeBERT)",
        mode=Mode.LEAVE,
        make=partial(_static, tune=tune_shared),
    ),
    "static-separate": Kind(
        description="all exits, a threshold each, tuned once on the bundle's tuning split "
        "(BranchyNet+, DeeBERT+)",
        mode=Mode.LEAVE,
        make=partial(_static, tune=tune_separate),
    ),
    "apparate": Kind(
        description="Apparate as published, tuned on the last 16 samples as its artifact does",
        mode=Mode.RELEASE,
        make=partial(_apparate, window=16),
    ),
    "apparate-512": Kind(
        description="Apparate, tuned on the last 512 samples",
        mode=Mode.RELEASE,
        make=partial(_apparate, window=512),
    ),
    "pame": Kind(
        description="PAME's reaction (7.6) on the bundle's policy, with all its exits at any "
        "--ramp-budget, and with feedback on every answer, which PAME itself lacks",
        mode=Mode.RELEASE,
        make=_pame,
    ),
    "certified-release": Kind(
        description="Offramp's, where every sample runs to the end",
        mode=Mode.RELEASE,
        make=partial(_served, name="certified", mode=Mode.RELEASE),
    ),
    "certified": Kind(
        description="Offramp's, where samples leave and some are audited",
        mode=Mode.AUDIT,
        make=partial(_served, name="certified", mode=Mode.AUDIT),
    ),
}
KINDS: Final[Mapping[str, Kind]] = {**_OWN, **added_kinds()}
"""Kinds of controllers by name, in the order of the tables."""
