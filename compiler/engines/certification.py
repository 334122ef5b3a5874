"""The promise certified anew in the precision of engines, against the float32 source model.

A bundle's policy was certified in float32. In float16 or int8 exits are sure of other samples, and
the model's end itself answers some otherwise: compression and exits spend one budget (E3 2.1). So
all exits are recorded again in the precision, as the bundle's were in float32, and the policy is
found again on what the end leaves of the budget
(:class:`~offramp.bundle.engines.PrecisionEvidence`): fixed by the tuning split, tested on the
certify split. While serving, early answers are compared with the end in the same precision, which
is what that policy was certified against.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import NEVER, ActiveExit, Bundle, ExitPolicy, Promise
from offramp.bundle.engine_index import PrecisionEvidence, addressed, model_digest
from offramp.bundle.engines import Precision
from offramp.calibration.choose.records import ExitRecords, dump_records, kept_records
from offramp.calibration.data.dataset import Dataset
from offramp.calibration.precision.quantization import Ranges
from offramp.certify.binomial import half_risk, upper_bound
from offramp.compiler.common.errors import VerificationError
from offramp.compiler.engines.halving import rounded
from offramp.compiler.engines.units import UnitGraphs
from offramp.compiler.engines.verification import (
    OPSETS_AS_THEY_ARE,
    PrecisionData,
    batches_of,
    failing_from,
    stage_runners,
)
from offramp.compiler.graphs.runtime import GraphRunner
from offramp.engine.answers.agreement import agreement_of
from offramp.engine.answers.exit_check import confidence_of
from offramp.engine.control.costs import CostModel
from offramp.engine.control.initial import certified_on
from offramp.engine.stages.plan import Mode, StageSpec, make_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Recertified:
    """A policy that was certified in a precision."""

    precision: Precision
    evidence: PrecisionEvidence
    records: bytes
    """Content of the evidence's file."""
    promise: Promise
    """The bundle's, in float32."""

    def describe(self) -> str:
        """One or two sentences for the command line."""
        evidence, promise = self.evidence, self.evidence.policy.promise
        spent = evidence.spent(evidence.confidence_level)
        text = (
            f"{self.precision}: of {evidence.samples:,} samples the model answers "
            f"{evidence.end_differs / evidence.samples:.2%} unlike in fp32, at most {spent:.2%} of "
            f"all, which is taken from the promise ({evidence.max_disagreement:.2%} at "
            f"{evidence.confidence_level:.0%}). For exits {evidence.max_disagreement - spent:.2%} "
            "are left"
        )
        if promise is None:
            return f"{text}: NONE CAN BE CERTIFIED, all samples will be answered at the end."
        return (
            f"{text}; certified anew they are predicted to save {promise.predicted_savings:.1%} of "
            f"the time (in fp32: {self.promise.predicted_savings:.1%})."
        )


def certify_anew(
    bundle: Bundle,
    precision: Precision,
    ranges: Ranges | None,
    parts: PrecisionData,
    *,
    threads: int = 1,
) -> Recertified:
    """Record all exits of a bundle in a precision, and certify those in use anew.

    All samples of ``parts`` but ``ranges`` are run, those that judge twice. The bundle has a
    promise; ``ranges`` are for ``int8``.

    Raises:
        VerificationError: The model's end alone may spend the promise.
        DataError: The model fails on a sample.
    """
    record = recorder(bundle, precision, ranges, threads=threads)
    tune, certify = record(parts.tune), record(parts.judged)
    source = source_predictions(bundle, parts.judged, threads=threads)
    return share_promise(bundle, precision, tune, certify, source)


def recorder(
    bundle: Bundle, precision: Precision, ranges: Ranges | None, *, threads: int = 1
) -> Callable[[Dataset], ExitRecords]:
    """Make what records all exits of a bundle, and the model's end, in a precision."""
    graphs = UnitGraphs(bundle, precision, ranges=ranges, tensorrt_version=OPSETS_AS_THEY_ARE)
    active = tuple(ActiveExit(exit=e.index, threshold=NEVER) for e in bundle.manifest.exits)
    stages = make_plan(bundle, ExitPolicy(version=1, active=active), Mode.AUDIT).stages
    runners = stage_runners(lambda unit: rounded(graphs.of(unit)), stages, threads)
    return lambda dataset: _recorded(bundle, stages, runners, dataset)


def source_predictions(bundle: Bundle, dataset: Dataset, *, threads: int = 1) -> NDArray[np.int32]:
    """[samples]: what the float32 source model answers."""
    plain = UnitGraphs(bundle, "fp32", tensorrt_version=OPSETS_AS_THEY_ARE)
    stages = make_plan(bundle, mode=Mode.OFF).stages
    runners = stage_runners(plain.of, stages, threads)
    return _recorded(bundle, stages, runners, dataset).final_prediction


def share_promise(
    bundle: Bundle,
    precision: Precision,
    tune: ExitRecords,
    certify: ExitRecords,
    source: NDArray[np.int32],
) -> Recertified:
    """Certify exits in a precision for what the model's end in it leaves of the promise.

    ``source`` [certify samples] is what the float32 model answers. VerificationError if the end
    leaves nothing.
    """
    task = bundle.manifest.answer.task
    if task.is_relative:
        raise VerificationError(
            f"{precision}: answers of {task.kind} are near to each other, or not, and what the end "
            "in another precision adds to that cannot be told from records; build with "
            "--precision fp32, or add --accept-disagreement to serve it all the same"
        )
    promise, calibration = bundle.policy.promise, bundle.manifest.calibration
    assert promise is not None, "there is nothing to certify"
    if promise.max_class_disagreement is not None:
        raise VerificationError(
            f"{precision}: the bundle promises at most {promise.max_class_disagreement:.2%} for "
            "each class, and what the end in another precision adds to that is not certified by "
            "class; build with --precision fp32, or compile without --max-class-disagreement"
        )
    differs = int(np.count_nonzero(certify.final_prediction != source))
    samples, level = len(source), promise.confidence_level
    spent = upper_bound(differs, samples, half_risk(level))
    if spent >= promise.max_disagreement:
        raise VerificationError(
            f"{precision}: of {samples:,} samples the model answers {differs / samples:.2%} unlike "
            f"in fp32, so at most {spent:.2%} of all at {half_risk(level):.1%}: that alone spends "
            f"the promise ({promise.max_disagreement:.2%} at {level:.0%}), without any exit. Build "
            "with a finer --precision (fp16, tf32 or fp32), give more --data, or add "
            "--accept-disagreement to serve it all the same"
        )
    policy = certified_on(
        [active.exit for active in bundle.policy.active],
        CostModel.of(bundle.manifest, bundle.profile(), calibration.reference_batch_size),
        kept_records(tune, certify),
        max_disagreement=promise.max_disagreement - spent,
        confidence_level=half_risk(level),
    )
    records = dump_records(tune, certify)
    evidence = PrecisionEvidence(
        model=model_digest(bundle.manifest),
        policy=replace(policy, version=bundle.policy.version),
        records=addressed("records", records, ".npz"),
        samples=samples,
        end_differs=differs,
        max_disagreement=promise.max_disagreement,
        confidence_level=level,
    )
    return Recertified(precision=precision, evidence=evidence, records=records, promise=promise)


def _recorded(
    bundle: Bundle, stages: Sequence[StageSpec], runners: Sequence[GraphRunner], dataset: Dataset
) -> ExitRecords:
    """Run samples through all stages; none leaves."""
    exits, samples = len(bundle.manifest.exits), len(dataset)
    found = ExitRecords(
        confidence=np.zeros((exits, samples), np.float32),
        prediction=np.zeros((exits, samples), np.int32),
        final_prediction=np.zeros(samples, np.int32),
        final_confidence=np.zeros(samples, np.float32),
        labels=dataset.labels,
        copies=dataset.copies,
    )
    form, task = bundle.manifest.answer.form, bundle.manifest.answer.task
    agreement = agreement_of(bundle.manifest.answer)
    for start, batch in batches_of(dataset):
        said: dict[int, NDArray[Any]] = {}
        tensors, rows = batch, slice(start, start + len(next(iter(batch.values()))))
        for stage, runner in zip(stages, runners, strict=True):
            with failing_from(dataset, start):
                tensors = tensors | runner.run(tensors)
            if stage.answer is None:
                continue
            answer = tensors[stage.answer]
            if stage.final:
                ends, mask = agreement.reduce(answer), agreement.mask_in(batch)
                found.final_prediction[rows] = agreement.codes(ends)
                found.final_confidence[rows] = confidence_of(answer, form, task)
                for place, ours in said.items():
                    found.prediction[place, rows] = agreement.codes_against(ours, ends, mask)
                continue
            assert stage.confidence is not None
            said[stage.answered_by] = agreement.reduce(answer)
            found.confidence[stage.answered_by, rows] = np.fmax(tensors[stage.confidence], 0)
    return found
