"""Checks of stages: answers, confidences, tensors for later stages, and exits."""

from __future__ import annotations

from collections import defaultdict
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.certify import NEVER
from offramp.engine.answers.differences import Scales
from offramp.engine.answers.exit_check import confidence_of
from offramp.engine.cuda.device_batch import CudaBatch
from offramp.engine.self_check.bench import read_tensors
from offramp.engine.self_check.check_results import (
    CheckFailedError,
    CheckSkippedError,
    Facts,
    TimeLimit,
)
from offramp.engine.self_check.subject import (
    CheckSubject,
    Inputs,
    StageAnswer,
    confidence_scale,
    difference,
    fail_beyond,
    join,
    take,
)
from offramp.engine.stages.plan import StageSpec

_CONFIDENCE_RTOL = 1e-5
"""Relative tolerance of confidences: the backend and numpy add float32 values in different orders.
"""
_BROKEN_ROWS = 2
_ONE = Scales.fixed(1.0)


def check_answers(subject: CheckSubject, limit: TimeLimit) -> Facts:
    """Compare every stage's answers and confidences with the reference, at several batch sizes."""
    worst: defaultdict[int, float] = defaultdict(float)
    sure: defaultdict[int, float] = defaultdict(float)
    facts: Facts = {"allowed": subject.tolerance, "batch_sizes": list(subject.sizes)}
    for size, rows in limit.cases(_batches(subject)):
        with subject.slot() as slot:
            for spec, answer, confidence in subject.answers(slot, take(subject.samples, rows)):
                _check_form(spec, answer, confidence, size)
                stage = subject.truth[spec.index]
                assert stage.answer is not None
                assert stage.confidence is not None
                found = difference(answer, stage.answer[rows], Scales.of(stage.answer))
                worst[spec.index] = max(worst[spec.index], found)
                scale = confidence_scale(stage.answer)
                found = difference(confidence, stage.confidence[rows], scale)
                sure[spec.index] = max(sure[spec.index], found)
    facts["largest_difference"] = max(worst.values())
    facts["by_stage"] = {f"stage {index}": found for index, found in worst.items()}
    facts["confidences_by_stage"] = {f"stage {index}": found for index, found in sure.items()}
    facts["left_out"] = limit.left_out
    for index, found in worst.items():
        fail_beyond(subject.tolerance, found, f"stage {index}'s answer", facts)
    for index, found in sure.items():
        fail_beyond(subject.tolerance, found, f"stage {index}'s confidence", facts)
    return facts


def check_carry(subject: CheckSubject, limit: TimeLimit) -> Facts:
    """Compare the tensors that stages carry (``StageSpec.carried``) with the reference's."""
    worst: dict[str, float] = {}
    facts: Facts = {"allowed": subject.tolerance}
    if len(subject.stages) == 1:
        raise CheckSkippedError("the model is one stage: it passes no tensors on")
    for _, rows in limit.cases(_batches(subject)):
        with subject.slot() as slot:
            for spec, result in subject.follow(slot, take(subject.samples, rows)):
                if result.carry is None:
                    continue
                tensors = read_tensors(subject.backend, slot, result.carry)
                if tensors is None:
                    raise CheckSkippedError("this backend's tensors cannot be read")
                for name, wanted in subject.truth[spec.index].carried.items():
                    found = difference(
                        _comparable(tensors[name], wanted), wanted[rows], Scales.of(wanted)
                    )
                    key = f"stage {spec.index}: {name}"
                    worst[key] = max(worst.get(key, 0.0), found)
    facts |= {"largest_difference": max(worst.values()), "by_tensor": worst}
    facts["left_out"] = limit.left_out
    for key, found in worst.items():
        fail_beyond(subject.tolerance, found, key, facts)
    return facts


def check_confidence(subject: CheckSubject, limit: TimeLimit) -> Facts:
    """Recompute every confidence from its answer and compare, also for inputs that are not finite.

    An answer with NaN, or with infinite logits, must not be able to leave. An exit is skipped if
    its confidence is not a function of its answer, for instance if it is replayed.
    """
    broken = subject.maker.broken(min(_BROKEN_ROWS, subject.max_rows))
    cases: dict[str, Inputs] = {} if broken is None else {"not finite": broken}
    cases["samples"] = take(subject.samples, slice(0, subject.max_rows))
    apart = [spec.index for spec in subject.plan.stages if not _follows(subject, spec)]
    facts: Facts = {"cases": [], "rows_without_number": 0, "left_aside": apart}
    worst = 0.0
    for case, inputs in limit.cases(cases.items()):
        facts["cases"].append(case)
        with subject.slot() as slot:
            for spec, answer, confidence in subject.answers(slot, inputs):
                if spec.index in apart:
                    continue
                own = confidence_of(answer, spec.form, spec.task)
                flat = answer.reshape(len(answer), -1).astype(np.float64)
                finite = np.isfinite(flat).all(axis=1)
                facts["rows_without_number"] += int((~finite).sum())
                without = (own == 0) & ~finite
                if (confidence[without] > 0).any():
                    raise CheckFailedError(
                        f"stage {spec.index} has confidence {confidence[without].max():.3g} in an "
                        f"answer that is not a number ({case}); expected 0, so that it never "
                        "leaves",
                        facts,
                    )
                if not ((confidence[finite] >= 0) & (confidence[finite] <= 1 + 1e-6)).all():
                    raise CheckFailedError(
                        f"stage {spec.index} has confidences from {confidence[finite].min()} to "
                        f"{confidence[finite].max()}, expected 0 to 1",
                        facts,
                    )
                worst = max(worst, difference(confidence[finite], own[finite], _ONE))
    facts["largest_difference"] = worst
    # In half precision the graph's steps are wider than float32's.
    facts["allowed"] = allowed = max(_CONFIDENCE_RTOL, subject.tolerance)
    fail_beyond(allowed, worst, "a confidence from its own answer", facts)
    return facts


def _follows(subject: CheckSubject, spec: StageSpec) -> bool:
    """Return whether a stage's confidence is a function of its answer, in the reference."""
    stage = subject.truth[spec.index]
    if stage.answer is None or stage.confidence is None:
        return False
    own = confidence_of(stage.answer, spec.form, spec.task)
    return difference(stage.confidence, own, _ONE) <= subject.tolerance


def check_thresholds(subject: CheckSubject, limit: TimeLimit) -> Facts:
    """Set thresholds equal to confidences: such rows must leave, and less confident rows stay."""
    exits = [spec for spec in subject.plan.stages if spec.answer is not None and not spec.final]
    if not exits:
        raise CheckSkippedError("the policy has no exits")
    facts: Facts = {"decisions": 0, "equal": 0, "found_on_device": 0}
    rows = min(subject.drawn_rows, subject.max_rows)
    inputs = take(subject.samples, slice(0, rows))
    for spec, rank in limit.cases(product(exits, (rows // 2, 0, rows - 1))):
        with subject.slot() as slot:
            batch = subject.before(slot, inputs, spec.index)
            seen = slot.run(subject.stages[spec.index], batch, NEVER).confidence
            threshold = float(np.sort(seen)[rank])
            thresholds = [NEVER] * spec.index + [threshold]
            thresholds += [NEVER] * (len(subject.stages) - len(thresholds))
            batch = subject.before(slot, inputs, spec.index)
            step = subject.pipeline(thresholds).step(slot, spec.index, batch)
            sure = step.result.confidence
            expected = sure >= np.float32(threshold)
            facts["decisions"] += len(sure)
            facts["equal"] += int((sure == np.float32(threshold)).sum())
            where = f"stage {spec.index} with threshold {threshold!r}"
            if not np.array_equal(step.exited, expected) or step.leaving != expected.sum():
                wrong = np.flatnonzero(step.exited != expected)
                row = int(wrong[0]) if len(wrong) else 0
                raise CheckFailedError(
                    f"{where}: row {row}, with confidence {float(sure[row])!r}, "
                    f"{'leaves' if step.exited[row] else 'stays'}; {int(expected.sum())} of "
                    f"{len(sure)} rows reach the threshold, but {step.leaving} leave",
                    facts,
                )
            carry = step.result.carry
            if isinstance(carry, CudaBatch) and carry.survivors is not None:
                facts["found_on_device"] += 1
                if carry.survivors.tolist() != np.flatnonzero(~expected).tolist():
                    raise CheckFailedError(
                        f"{where}: rows {carry.survivors.tolist()} survive in the kernel, "
                        f"expected {np.flatnonzero(~expected).tolist()}",
                        facts,
                    )
    facts["left_out"] = limit.left_out
    return facts


def check_batch_mates(subject: CheckSubject, limit: TimeLimit) -> Facts:
    """Run samples alone, among others and among broken samples: answers must be equal."""
    count = subject.max_rows
    if count < 2:
        raise CheckSkippedError("the largest batch has one row")
    facts: Facts = {"allowed": subject.tolerance, "with": []}
    worst = 0.0
    target = take(subject.samples, slice(0, 1))
    with subject.slot() as slot:
        alone = subject.answers(slot, target)
    broken = subject.maker.broken(min(_BROKEN_ROWS, count - 1))
    mates = {} if broken is None else {"those that are not finite": broken}
    ends = np.arange(subject.drawn_rows, subject.sample_count)[: count - 1]
    mates["those at the ends"] = take(subject.samples, ends)
    mates["others"] = take(subject.samples, slice(1, count))
    mates["others, in reverse"] = take(subject.samples, np.arange(count - 1, 0, -1))
    for name, others in limit.cases(mates.items()):
        facts["with"].append(name)
        for place in (0, len(next(iter(others.values())))):
            before, after = take(others, slice(0, place)), take(others, slice(place, None))
            with subject.slot() as slot:
                together = subject.answers(slot, join(before, target, after))
            found = _row_difference(alone, together, place)
            worst = max(worst, found)
            facts["largest_difference"] = worst
            where = f"an answer among {name} from that of the same sample alone"
            fail_beyond(subject.tolerance, found, where, facts)
    facts["left_out"] = limit.left_out
    return facts


def _row_difference(alone: list[StageAnswer], together: list[StageAnswer], place: int) -> float:
    """Return the largest difference of one sample's answers, alone and at a place in a batch."""
    worst = 0.0
    for one, many in zip(alone, together, strict=True):
        row = slice(place, place + 1)
        worst = max(worst, difference(many.answer[row], one.answer))
        scale = confidence_scale(one.answer)
        worst = max(worst, difference(many.confidence[row], one.confidence, scale))
    return worst


def _batches(subject: CheckSubject) -> list[tuple[int, NDArray[np.intp]]]:
    """Return batch sizes and the samples to run: random samples, then range ends; largest first."""
    batches = [(size, np.arange(size)) for size in reversed(subject.sizes)]
    ends = np.arange(subject.drawn_rows, subject.sample_count)
    size = min(len(ends), subject.max_rows)
    return [batches[0], (size, ends[:size]), *batches[1:]]


def _check_form(
    spec: StageSpec, answer: NDArray[Any], confidence: NDArray[np.float32], rows: int
) -> None:
    if len(answer) != rows or confidence.shape != (rows,) or confidence.dtype != np.float32:
        raise CheckFailedError(
            f"stage {spec.index} answers {rows} rows with {answer.dtype} {list(answer.shape)} and "
            f"confidences {confidence.dtype} {list(confidence.shape)}"
        )


def _comparable(values: NDArray[Any], wanted: NDArray[Any]) -> NDArray[Any]:
    """Convert bfloat16, which is returned as its bits, to float32."""
    if values.dtype == np.uint16 and wanted.dtype.kind == "f":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values
