"""The policies of the frontier: chosen and certified again at each bound, from bundles alone.

A bundle keeps its exits' records of the tune and certify splits, so that no data is needed. Exits
and thresholds are chosen as ``eecompile`` chooses them by default, by savings; nothing is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from offramp.bundle import Bundle, ExitPolicy
from offramp.bundle.records import CERTIFY, TUNE
from offramp.calibration.choose.exit_records import ExitRecords
from offramp.compiler.exits.policy_choice import FixedPath, PolicyChoice

SOURCE: Final = "source"
INT8: Final = "int8"
INT8_CERTIFIED: Final = "int8-certified"
EXITS: Final = "exits"
BOTH: Final = "both"
ALONE: Final = (INT8_CERTIFIED, EXITS)
CERTIFIED: Final = (*ALONE, BOTH)
DESCRIPTIONS: Final = {
    SOURCE: "the float32 source model alone",
    INT8: "the int8 copy's own answer for everybody, which nobody certified",
    INT8_CERTIFIED: "the copy answers where it is sure enough, else the source model; certified",
    EXITS: "exits on the float32 model, no copy; certified",
    BOTH: "exits on the int8 copy, its own answer the last, then the source model; certified",
}
_OTHER: Final = {"fp32": "int8", "int8": "fp32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BundlePair:
    """A bundle of precision fp32, and a cascade of the same model."""

    exits: Bundle
    """Bundle of fp32: exits on the float32 model."""
    cascade: Bundle
    """Bundle of int8: exits on the copy, followed by the float32 model."""

    @classmethod
    def of(cls, bundle: Bundle, other: Bundle) -> BundlePair:
        """Return the pair, identified by precision; ValueError if they do not form one."""
        where, (a, b) = f"--precision {other.path}", (bundle.manifest, other.manifest)
        if a.precision == b.precision:
            raise ValueError(
                f"{where}: it is of precision {b.precision}, as {bundle.path} is; expected one of "
                f"fp32 and one of int8. {how_to_make(bundle)}"
            )
        for what, mine, its in (
            ("source model", _source(bundle), _source(other)),
            ("inputs", _inputs(bundle), _inputs(other)),
            ("answer", a.answer, b.answer),
        ):
            if mine != its:
                raise ValueError(
                    f"{where}: its {what} is {its}, expected {mine} as in {bundle.path}: both "
                    f"bundles must be of one model. {how_to_make(bundle)}"
                )
        exits, cascade = (bundle, other) if a.precision == "fp32" else (other, bundle)
        return cls(exits=exits, cascade=cascade)

    @property
    def bundles(self) -> tuple[Bundle, Bundle]:
        """The bundle with exits on the model itself, and the cascade."""
        return self.exits, self.cascade

    def bundle_of(self, system: str) -> Bundle:
        """Return the bundle that a system is made of."""
        return self.exits if system in (SOURCE, EXITS) else self.cascade


def how_to_make(bundle: Bundle) -> str:
    """Return the command that makes the other bundle of a pair."""
    precision = _OTHER[bundle.manifest.precision]
    name = bundle.path.name.removesuffix(".ee")
    nothing = " (of fp32 again where int8 saves nothing beside exits here: it says why)"
    return (
        f"Make the other bundle of the data that made {bundle.path}, and name it as OTHER: "
        f"eecompile {bundle.manifest.source.original_name} --data CALIBRATION.npz --precision "
        f"{precision} --output {name}_{precision}.ee" + (nothing if precision == "int8" else "")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPolicy:
    """Candidate policy of a system at a bound."""

    system: str
    """One of :data:`CERTIFIED`."""
    max_disagreement: float
    """Largest share of answers that may differ from the source model's."""
    policy: ExitPolicy | None
    """Policy with its promise; ``None`` if none was certified, so that the source model is
    served.
    """
    reason: str | None
    """Reason why there is no policy; ``None`` if there is one."""


def choose_policies(
    pair: BundlePair, bounds: Sequence[float], confidence_level: float
) -> list[FrontierPolicy]:
    """Choose and certify a policy of each system at each bound, bounds in the given order.

    Each certificate is valid with ``confidence_level`` individually. All come from one certify
    split, so that all of them hold jointly with less.
    """
    records = {
        bundle.path: [ExitRecords.kept_by(bundle, split) for split in (TUNE, CERTIFY)]
        for bundle in pair.bundles
    }
    found = []
    for bound in bounds:
        for system in CERTIFIED:
            bundle = pair.bundle_of(system)
            choice = PolicyChoice.again(
                bundle, max_disagreement=bound, confidence_level=confidence_level
            )
            tune, certify = records[bundle.path]
            found.append(_chosen(system, bundle, choice, tune, certify))
    return found


def _chosen(
    system: str, bundle: Bundle, choice: PolicyChoice, tune: ExitRecords, certify: ExitRecords
) -> FrontierPolicy:
    policy, reason = None, None
    if not bundle.manifest.exits:
        reason = f"{bundle.path} has no exits: none was worth building when it was compiled"
    else:
        path = (
            FixedPath.of(tune, [bundle.manifest.exits[-1].index])  # the copy's own answer
            if system == INT8_CERTIFIED
            else choice.by_savings(tune)
        )
        certified = choice.certify(path, certify)
        if certified.active:
            policy = certified
        else:
            reason = choice.limit(path, tune, certify)
    return FrontierPolicy(
        system=system, max_disagreement=choice.max_disagreement, policy=policy, reason=reason
    )


def _source(bundle: Bundle) -> str:
    source = bundle.manifest.source
    return f"{source.original_name} (SHA-256 {source.original_sha256[:16]}…)"


def _inputs(bundle: Bundle) -> str:
    return "; ".join(tensor.describe() for tensor in bundle.manifest.declared)
