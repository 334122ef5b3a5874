"""The controller of a served bundle, by the name on the command line."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from offramp.bundle import Bundle, ExitPolicy, Profile
from offramp.bundle.engines import PrecisionEvidence
from offramp.bundle.schema.compilation import BatchEffect
from offramp.certify.binomial import half_risk
from offramp.engine.common.control_state import identity_of
from offramp.engine.common.errors import OptionsError
from offramp.engine.control.adjustment import DEFAULT_MAX_OVERHEAD, ExitProposals
from offramp.engine.control.certified import CertifiedController, CertifiedSettings
from offramp.engine.control.controller import Controller
from offramp.engine.control.costs import CostModel
from offramp.engine.control.initial import certified_on, within_budget
from offramp.engine.control.shift import ShiftGuard
from offramp.engine.control.static import StaticController
from offramp.engine.models.options import ModelOptions, added_controllers
from offramp.engine.models.whole_promise import end_evidence
from offramp.engine.stages.plan import Mode

MAX_DISAGREEMENT: Final = 0.01
"""The constraint where neither bundle nor user names one: a bundle without exits promises none."""
STATIC_AUDIT_PROBABILITY: Final = 0.05
"""Of a static policy in audit mode: it has no evidence to aim for."""


def make_controller(
    bundle: Bundle, profile: Profile, mode: Mode, options: ModelOptions
) -> tuple[Controller, Mapping[str, str]]:
    """Make the controller that the options name, and the fingerprint of what its state fits.

    It starts from the bundle's records and policy, or where the policy does not suit, from one that
    was certified the same way. In release mode everything runs to the end, so that exits only cost
    throughput: there the ramp budget is Apparate's 2 % unless the options say otherwise, and exits
    beyond it are left out. Where exits depend on earlier ones, the policy stays as it is.
    """
    records = bundle.records()
    promise = bundle.policy.promise
    max_disagreement, confidence_level = left_for_exits(bundle, options)
    costs = CostModel.of(bundle.manifest, profile, options.max_batch_size)
    budget = ramp_budget(bundle.policy, costs, mode, options)
    limits: dict[str, Any] = {
        "max_disagreement": max_disagreement,
        "confidence_level": confidence_level,
    }
    policy = bundle.policy
    depends = bundle.manifest.answer.criterion.depends_on_earlier
    kept = tuple(active.exit for active in policy.active)
    if not depends:  # without an exit, what later ones say would be another matter
        kept = within_budget(
            policy, costs, records, max_overhead=budget, max_disagreement=max_disagreement
        )
    suits = promise is not None and promise.covers(max_disagreement, confidence_level)
    of_classes = None if promise is None else promise.max_class_disagreement
    if not suits or len(kept) < len(policy.active):
        policy = certified_on(
            kept,
            costs,
            records,
            answer=bundle.manifest.answer,
            max_class_disagreement=of_classes,
            **limits,
        )
    # what is served is too little to certify each class again
    pinned = options.never_beyond_compiled or of_classes is not None
    controller: Controller
    if options.controller == "static" or depends:
        audited = 1.0 if mode is Mode.RELEASE else STATIC_AUDIT_PROBABILITY
        controller = StaticController(policy, **limits, audit_probability=audited)
    elif kind := added_controllers().get(options.controller):
        if of_classes is not None:
            raise OptionsError(
                f"{bundle.path} promises at most {of_classes:g} for each class, and controller "
                f"{kind.name} tunes thresholds of its own; choose certified or static"
            )
        controller = kind.make(policy, costs, max_overhead=budget, **limits)
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
            # exits that were not compiled in would never answer
            proposals=None if pinned else ExitProposals(costs, max_overhead=budget),
        )
    fingerprint = {
        **identity_of(bundle),
        "mode": mode.value,
        "controller": options.controller,
        "max_disagreement": repr(max_disagreement),
        "confidence": repr(confidence_level),
        # as asked for: what of it follows from times differs a little at every start
        "ramp_budget": repr(_least_budget(mode, options)),
        "never_beyond_compiled": repr(pinned),
    }
    return controller, fingerprint


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
    """Return a bundle's policy without its exits that are not among ``exits``.

    It is certified anew, since rows that would have left there leave at later ones now. The policy
    stays as it is where no such exit is in it, where exits depend on earlier ones, and where no
    early answer is certified.
    """
    kept = tuple(active.exit for active in bundle.policy.active if active.exit in exits)
    promise = bundle.policy.promise
    depends = bundle.manifest.answer.criterion.depends_on_earlier
    if depends or promise is None or len(kept) == len(bundle.policy.active):
        return bundle.policy
    max_disagreement, confidence_level = left_for_exits(bundle, options)
    found = certified_on(
        kept,
        CostModel.of(bundle.manifest, profile, options.max_batch_size),
        bundle.records(),
        max_disagreement=max_disagreement,
        confidence_level=confidence_level,
        answer=bundle.manifest.answer,
        max_class_disagreement=promise.max_class_disagreement,
    )
    return bundle.policy if found.promise is None else found


def left_for_exits(bundle: Bundle, options: ModelOptions) -> tuple[float, float]:
    """Tell what exits may answer unlike the model's end, and at which confidence.

    That is all of the constraint, but where engines of another precision run the model, or its
    answers depend on the batch: what the end may answer otherwise is taken from it, and half of the
    risk. OptionsError if nothing is left.
    """
    promise, evidence = bundle.policy.promise, end_evidence(bundle)
    if evidence is None:
        compiled_for = MAX_DISAGREEMENT if promise is None else promise.max_disagreement
        return options.max_disagreement or compiled_for, options.confidence
    allowed = options.max_disagreement or evidence.max_disagreement
    spent = evidence.spent(options.confidence)
    if spent >= allowed:
        raise OptionsError(
            f"{bundle.path}: {_CAUSES[type(evidence)]} may answer {spent:.2%} of samples unlike "
            f"the source model, without any exit, which spends the constraint of {allowed:.2%} at "
            f"{options.confidence:g} confidence; give a larger --max-disagreement, a smaller "
            f"--confidence, or {_REMEDIES[type(evidence)]}"
        )
    return allowed - spent, half_risk(options.confidence)


def ramp_budget(policy: ExitPolicy, costs: CostModel, mode: Mode, options: ModelOptions) -> float:
    """How much later the model's end may come for the exits in use, as a share.

    What the user asks for is a limit on everything. Where nothing is asked, a cascade's quantised
    model is not counted: it comes late by that for any exit, and saves by far more.
    """
    least = _least_budget(mode, options)
    if options.ramp_budget is not None:
        return least
    least += costs.front_ms / costs.source_ms
    if mode is Mode.RELEASE:
        return least
    return max(costs.overhead([active.exit for active in policy.active]), least)


def _least_budget(mode: Mode, options: ModelOptions) -> float:
    """The ramp budget as far as it does not follow from measured times."""
    if options.ramp_budget is not None:
        return options.ramp_budget
    return DEFAULT_MAX_OVERHEAD if mode is Mode.RELEASE else 0.1
