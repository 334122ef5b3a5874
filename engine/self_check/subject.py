"""A bundle on a backend, as checks see it: prepared stages, inputs, and what is true of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Bundle
from offramp.certify import MODEL_END, NEVER
from offramp.engine.answers.differences import Scales, relative_difference
from offramp.engine.answers.exit_check import confidence_of
from offramp.engine.backends import Backend, Slot, StageResult, TensorBatch
from offramp.engine.self_check.inputs import InputMaker, Inputs, join
from offramp.engine.self_check.reference import ChainedReference
from offramp.engine.self_check.results import CheckFailedError
from offramp.engine.stages.base import Stage
from offramp.engine.stages.pipeline import Pipeline
from offramp.engine.stages.plan import Mode, Plan, StageSpec


class StageAnswer(NamedTuple):
    """What a stage said of a batch of b rows."""

    spec: StageSpec
    answer: NDArray[Any]
    """[b, classes]."""
    confidence: NDArray[np.float32]
    """[b]."""


class TrueStage(NamedTuple):
    """What the reference has at a stage's end, of all samples of a subject."""

    answer: NDArray[Any] | None
    confidence: NDArray[np.float32] | None
    carried: Mapping[str, NDArray[Any]]


@dataclass(kw_only=True)
class CheckSubject:
    """A bundle's stages on a backend; used by one check at a time.

    Its samples are ``max_rows`` (7 at least) that are drawn, and behind them those at the ends of
    the inputs' ranges.
    """

    name: str
    bundle: Bundle
    backend: Backend
    plan: Plan
    stages: tuple[Stage, ...]
    max_rows: int
    tolerance: float
    """Difference from the reference that is allowed, relative to an element's scale."""
    threads: int = 1
    """Of the reference."""

    @cached_property
    def maker(self) -> InputMaker:
        """Makes the inputs."""
        return InputMaker(self.bundle)

    @property
    def drawn_rows(self) -> int:
        """How many samples are drawn."""
        return max(self.max_rows, 7)

    @cached_property
    def samples(self) -> Inputs:
        """All samples."""
        return join(self.maker.drawn(self.drawn_rows), self.maker.at_the_ends())

    @cached_property
    def sample_count(self) -> int:
        """How many there are."""
        return len(next(iter(self.samples.values())))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The batch sizes that are run: 1, 2, 7 and the largest, as far as they are allowed."""
        return tuple(sorted({min(size, self.max_rows) for size in (1, 2, 7, self.max_rows)}))

    @cached_property
    def truth(self) -> tuple[TrueStage, ...]:
        """What the reference has of all samples at the end of each stage; computed once."""
        specs, manifest = self.plan.stages, self.bundle.manifest
        exits = {s.exit for s in specs if s.exit is not None and s.exit != MODEL_END}
        names = {n for s in specs for n in (s.answer, s.confidence, *s.carried) if n is not None}
        given = set(self.samples)
        found = ChainedReference(self.bundle, exits, threads=self.threads).run(
            self.samples, names - given
        )
        found |= {name: self.samples[name] for name in names & given}
        stages = []
        for spec in specs:
            answer = None if spec.answer is None else found[spec.answer]
            confidence = None
            if answer is not None:
                own = confidence_of(answer, manifest.answer.form, manifest.answer.task)
                confidence = own if spec.confidence is None else found[spec.confidence]
            carried = {name: found[name] for name in spec.carried}
            stages.append(TrueStage(answer, confidence, carried))
        return tuple(stages)

    @contextmanager
    def slot(self) -> Iterator[Slot]:
        """Open a slot for as long as the block takes."""
        opened = self.backend.open_slot()
        try:
            yield opened
        finally:
            opened.close()

    def release(self) -> None:
        """Let go of the stages; nothing can be run any more."""
        self.stages = ()
        self.__dict__.pop("parting", None)

    def follow(
        self, slot: Slot, inputs: Mapping[str, NDArray[Any]], *, until: int | None = None
    ) -> Iterator[tuple[StageSpec, StageResult]]:
        """Run a batch through all stages, or those before ``until``, with nobody leaving."""
        batch: TensorBatch = slot.upload(inputs)
        for spec, stage in list(zip(self.plan.stages, self.stages, strict=True))[:until]:
            result = slot.run(stage, batch, NEVER)
            yield spec, result
            if result.carry is not None:
                batch = result.carry

    def before(self, slot: Slot, inputs: Mapping[str, NDArray[Any]], stage: int) -> TensorBatch:
        """Run a batch up to a stage; gives what that takes."""
        batch: TensorBatch = slot.upload(inputs)
        for each in self.stages[:stage]:
            carry = slot.run(each, batch, NEVER).carry
            assert carry is not None, "only the last stage carries nothing"
            batch = carry
        return batch

    def answers(self, slot: Slot, inputs: Mapping[str, NDArray[Any]]) -> list[StageAnswer]:
        """Run a batch through all stages; gives what those say that answer."""
        found = []
        for spec, (answer, confidence, _) in self.follow(slot, inputs):
            if answer is not None:
                found.append(StageAnswer(spec, answer, confidence))
        return found

    def pipeline(self, thresholds: Sequence[float] | None = None) -> Pipeline:
        """The stages in leave mode, with the policy's thresholds or others, one a stage."""
        given = [spec.threshold for spec in self.plan.stages] if thresholds is None else thresholds
        specs = tuple(
            replace(spec, threshold=float(np.float32(threshold)))
            for spec, threshold in zip(self.plan.stages, given, strict=True)
        )
        plan = Plan(stages=specs, policy_version=self.plan.policy_version, mode=Mode.LEAVE)
        return Pipeline(self.backend, plan, prepare=lambda spec: self.stages[spec.index])

    @cached_property
    def parting(self) -> Pipeline:
        """The stages with thresholds in the widest gap between confidences, so that some leave.

        No rounding moves a sample over such a threshold.
        """
        return self.pipeline([_parting(stage) for stage in self.truth])


def _parting(stage: TrueStage) -> float:
    if stage.confidence is None or not stage.carried:
        return NEVER if stage.carried else 0.0
    sure = np.sort(stage.confidence[np.isfinite(stage.confidence)].astype(np.float64))
    if len(sure) < 2 or sure[0] == sure[-1]:
        return NEVER
    widest = int(np.argmax(np.diff(sure)))
    return float(sure[widest] + sure[widest + 1]) / 2


def difference(found: NDArray[Any], wanted: NDArray[Any], scales: Scales | None = None) -> float:
    """Return the largest difference over elements that are finite in ``wanted``.

    It is relative to ``scales``, those of ``wanted`` unless they are given. Infinite where
    ``found`` alone is not finite, or of another shape; 0 where there is nothing to compare.
    """
    if found.shape == wanted.shape:
        wanted = wanted.astype(np.float64)
        found = np.where(np.isfinite(wanted), found.astype(np.float64), wanted)
    return relative_difference(found, wanted, scales)


def confidence_scale(answers: NDArray[Any]) -> Scales:
    """Return what confidences are measured by: a softmax passes on its logits' absolute error."""
    return Scales.fixed(max(1.0, Scales.of(answers).ordinary))


def fail_beyond(allowed: float, worst: float, where: str, facts: dict[str, Any]) -> None:
    """Raise CheckFailedError if a difference is larger than allowed."""
    if not worst <= allowed:
        raise CheckFailedError(
            f"{where} differs by {worst:.1e} of its scale, allowed are {allowed:.1e}",
            facts,
        )
