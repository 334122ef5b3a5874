"""The controller of a served bundle, by its name on the command line."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from numpy.typing import NDArray

from offramp.bundle import Bundle, ExitPolicy, Profile
from offramp.bundle.engines import PrecisionEvidence
from offramp.bundle.schema.compilation import BatchEffect
from offramp.certify.binomial import half_risk
from offramp.engine.common.control_state import identity_of
from offramp.engine.common.errors import OptionsError
from offramp.engine.control.adjustment import DEFAULT_MAX_OVERHEAD, ExitProposals
from offramp.engine.control.certified import CertifiedController, CertifiedSettings
from offramp.engine.control.controller import Controller, ControlTask
from offramp.engine.control.costs import CostModel
from offramp.engine.control.initial import certified_on, within_budget
from offramp.engine.control.shift import ShiftGuard
from offramp.engine.control.static import StaticController
from offramp.engine.models.options import ModelOptions, added_controllers
from offramp.engine.models.whole_promise import end_evidence
from offramp.engine.stages.plan import Mode

_log = logging.getLogger(__name__)

MAX_DISAGREEMENT: Final = 0.01
"""Largest share of differing answers if neither bundle nor user sets it (a bundle without exits
sets none)."""
STATIC_AUDIT_PROBABILITY: Final = 0.05
"""Audit probability of controllers without a target for evidence (``static``, and those of
extensions)."""


def make_controller(
    bundle: Bundle, profile: Profile, mode: Mode, options: ModelOptions
) -> tuple[Controller, Mapping[str, str]]:
    """Make the controller that the options name, and the fingerprint that its state must match.

    The controller starts from the bundle's records and policy. If the policy does not fit the
    options, it starts from a policy that is certified in the same way.

    In release mode every sample runs to the model's end: exits save no compute. Therefore the ramp
    budget is Apparate's 2 % by default, and exits that exceed the budget are left out. The same
    holds in audit mode under a controller that lets all samples run on. If exits depend on earlier
    exits, the policy stays unchanged.
    """
    records = bundle.records()
    max_disagreement, confidence_level = left_for_exits(bundle, options)
    limits: dict[str, Any] = {
        "max_disagreement": max_disagreement,
        "confidence_level": confidence_level,
    }
    costs = CostModel.of(bundle.manifest, profile, options.max_batch_size)
    depends = bundle.manifest.answer.criterion.depends_on_earlier
    kind = None if depends else added_controllers().get(options.controller)
    all_run_on = mode is Mode.RELEASE or (kind is not None and kind.runs_on)
    budget = ramp_budget(bundle.policy, costs, options, all_run_on=all_run_on)
    audited = 1.0 if all_run_on else STATIC_AUDIT_PROBABILITY
    # where exits depend on earlier ones, none can be removed
    most = math.inf if depends else budget
    policy = _within_limits(bundle, costs, records, max_overhead=most, **limits)
    promise = bundle.policy.promise
    of_classes = None if promise is None else promise.max_class_disagreement
    # served samples are too few to certify each class again
    pinned = options.never_beyond_compiled or of_classes is not None
    if kind is None and policy is not bundle.policy and policy.active and policy.promise is None:
        stays = options.controller == "static" or depends or pinned
        _log.warning(
            "%s: no exit answers%s: the calibration data cannot certify that exits disagree on at "
            "most %g of samples, at confidence %g; compile with more data, or raise "
            "--max-disagreement",
            bundle.path,
            "" if stays else " until served samples certify it",
            max_disagreement,
            confidence_level,
        )
    controller: Controller
    if options.controller == "static" or depends:
        controller = StaticController(policy, **limits, audit_probability=audited)
    elif kind is not None:
        if of_classes is not None:
            raise OptionsError(
                f"{bundle.path} promises at most {of_classes:g} for each class, and controller "
                f"{kind.name} tunes its own thresholds; choose certified or static"
            )
        controller = kind.make(
            ControlTask(
                manifest=bundle.manifest,
                profile=profile,
                policy=policy,
                batch_size=options.max_batch_size,
                costs=costs,
                max_overhead=budget,
                audit_probability=audited,
                **limits,
            )
        )
    else:
        controller = CertifiedController(
            policy,
            costs,
            records,
            CertifiedSettings(
                audit_budget=options.audit_budget,
                release=mode is Mode.RELEASE,
                never_beyond_compiled=pinned,
                **limits,
            ),
            guard=ShiftGuard(records["confidence"]),
            # exits beyond the compiled ones would never answer
            proposals=None if pinned else ExitProposals(costs, max_overhead=budget),
        )
    fingerprint = {
        **identity_of(bundle),
        "mode": mode.value,
        "controller": options.controller,
        "max_disagreement": repr(max_disagreement),
        "confidence": repr(confidence_level),
        # the requested budget: the part that depends on measured times differs at every start
        "ramp_budget": repr(_least_budget(options, all_run_on=all_run_on)),
        "never_beyond_compiled": repr(pinned),
    }
    return controller, fingerprint


def _within_limits(
    bundle: Bundle,
    costs: CostModel,
    records: Mapping[str, NDArray[Any]],
    *,
    max_overhead: float,
    max_disagreement: float,
    confidence_level: float,
) -> ExitPolicy:
    """Return the bundle's policy if it fits the limits, else one certified for its exits."""
    policy, promise = bundle.policy, bundle.policy.promise
    kept = within_budget(
        policy, costs, records, max_overhead=max_overhead, max_disagreement=max_disagreement
    )
    if len(kept) < len(policy.active):
        _log.warning(
            "%s: %s of %d compiled exits may answer, as exits in use may delay the model's end by "
            "at most %.1f %% here, and all of them would by %.1f %%; "
            "a larger --ramp-budget lets more exits answer",
            bundle.path,
            len(kept) or "none",
            len(policy.active),
            100 * max_overhead,
            100 * costs.overhead([active.exit for active in policy.active]),
        )
    suits = promise is not None and promise.covers(max_disagreement, confidence_level)
    if suits and len(kept) == len(policy.active):
        return policy
    limits = {"max_disagreement": max_disagreement, "confidence_level": confidence_level}
    return _certified(bundle, kept, costs, **limits)


def _certified(
    bundle: Bundle,
    exits: Sequence[int],
    costs: CostModel,
    *,
    max_disagreement: float,
    confidence_level: float,
) -> ExitPolicy:
    """Certify some of a bundle's exits; per class too, if the bundle's promise holds per class."""
    promise = bundle.policy.promise
    return certified_on(
        exits,
        costs,
        bundle.records(),
        max_disagreement=max_disagreement,
        confidence_level=confidence_level,
        answer=bundle.manifest.answer,
        max_class_disagreement=None if promise is None else promise.max_class_disagreement,
    )


_CAUSES: dict[type, str] = {
    PrecisionEvidence: "the engines that are served",
    BatchEffect: "the model, in other batches,",
}
_REMEDIES: dict[type, str] = {
    PrecisionEvidence: "serve engines of another --precision",
    BatchEffect: "compile the float32 model",
}


def policy_of_exits(
    bundle: Bundle, exits: Collection[int], profile: Profile, options: ModelOptions
) -> ExitPolicy:
    """Return a bundle's policy with only the exits that are among ``exits``.

    The policy is certified again, because samples that would have left at a removed exit now leave
    at later exits. The policy stays unchanged if no exit is removed, if exits depend on earlier
    exits, or if no early answer can be certified.
    """
    kept = tuple(active.exit for active in bundle.policy.active if active.exit in exits)
    promise = bundle.policy.promise
    depends = bundle.manifest.answer.criterion.depends_on_earlier
    if depends or promise is None or len(kept) == len(bundle.policy.active):
        return bundle.policy
    max_disagreement, confidence_level = left_for_exits(bundle, options)
    costs = CostModel.of(bundle.manifest, profile, options.max_batch_size)
    limits = {"max_disagreement": max_disagreement, "confidence_level": confidence_level}
    found = _certified(bundle, kept, costs, **limits)
    return bundle.policy if found.promise is None else found


def left_for_exits(bundle: Bundle, options: ModelOptions) -> tuple[float, float]:
    """Return the disagreement allowed for exits, and the confidence level for it.

    By default this is the whole constraint (``max_disagreement``, ``confidence``). If engines of
    another precision run the model, or its answers depend on the batch, the model's end itself may
    disagree with the source model. This disagreement is subtracted, and half of the allowed risk (1
    - confidence) is used for it. OptionsError if nothing is left.
    """
    promise, evidence = bundle.policy.promise, end_evidence(bundle)
    if evidence is None:
        compiled_for = MAX_DISAGREEMENT if promise is None else promise.max_disagreement
        return options.max_disagreement or compiled_for, options.confidence
    allowed = options.max_disagreement or evidence.max_disagreement
    spent = evidence.spent(options.confidence)
    if spent >= allowed:
        raise OptionsError(
            f"{bundle.path}: {_CAUSES[type(evidence)]} may answer {spent:.2%} of samples "
            "differently from the source model, without any exit, which spends the constraint of "
            f"{allowed:.2%} at {options.confidence:g} confidence; raise --max-disagreement, lower "
            f"--confidence, or {_REMEDIES[type(evidence)]}"
        )
    return allowed - spent, half_risk(options.confidence)


def ramp_budget(
    policy: ExitPolicy, costs: CostModel, options: ModelOptions, *, all_run_on: bool
) -> float:
    """Return the largest delay of the model's end by the exits in use, as a share.

    A budget that the user sets limits all overhead. By default, the time of a cascade's quantised
    model is not counted: it delays the model's end with any exit, and saves far more.
    """
    least = _least_budget(options, all_run_on=all_run_on)
    if options.ramp_budget is not None:
        return least
    least += costs.front_ms / costs.source_ms
    if all_run_on:
        return least
    return max(costs.overhead([active.exit for active in policy.active]), least)


def _least_budget(options: ModelOptions, *, all_run_on: bool) -> float:
    """Return the part of the ramp budget that does not depend on measured times."""
    if options.ramp_budget is not None:
        return options.ramp_budget
    return DEFAULT_MAX_OVERHEAD if all_run_on else 0.1
