"""Predictions of stage latencies: from a profile, corrected by observations."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from offramp.bundle import Profile
from offramp.certify import MODEL_END, FloatArray
from offramp.engine.scheduling.stage_table import Shrinking, StageTable

_MEMORY = 1 / 32
"""Weight of one observed time in the running means."""
_DEVIATIONS = 2.0
"""Number of mean absolute deviations added to the mean for a prediction with a margin."""
_PATIENCE = 256
"""If this number of samples is dropped in a row, without any run, predictions are not trusted."""
_FASTEST, _SLOWEST = 1 / 16, 16.0
"""Bounds of the correction factor: an observation outside of them has another cause than speed."""


def stage_seconds(
    profile: Profile,
    stages: Sequence[tuple[int, int, int | None]],
    max_batch_size: int,
    *,
    overhead_s: float = 0.0,
) -> tuple[tuple[float, ...], ...]:
    """Predict the seconds of a plan's stages, in order, at batch sizes up to ``max_batch_size``.

    Each stage is given by its first and last segment, and the exit that it ends with (or ``None``,
    or ``MODEL_END``). Between the sizes of the profile, times are interpolated; above the largest
    size, times are extrapolated with the last slope. ``overhead_s`` is the additional time per
    stage of the executor, for any batch size. Returns [stages][max_batch_size + 1] seconds by batch
    size; index 0 is 0. One stage with all segments of the source model costs the source model's
    time; each stage with an exit costs its head and one border (a cut between stages) more.
    """
    table = []
    for first, last, exit_ in stages:
        rows = list(profile.segments_ms[first : last + 1])
        if exit_ is not None and exit_ != MODEL_END:
            rows += [profile.exits_ms[exit_], profile.stages_ms[exit_]]
        row = _at_sizes(profile.batch_sizes, np.sum(rows, axis=0) / 1e3, max_batch_size)
        table.append((0.0, *(seconds + overhead_s for seconds in row[1:])))
    return tuple(table)


def _at_sizes(profiled: Sequence[int], seconds: FloatArray, largest: int) -> list[float]:
    """Interpolate without decreasing times: a small batch can be padded to a larger one."""
    known, values = [0, *profiled], [0.0, *np.maximum.accumulate(seconds).tolist()]
    wanted = np.arange(largest + 1)
    slope = (values[-1] - values[-2]) / (known[-1] - known[-2])
    beyond = values[-1] + slope * (wanted - known[-1])
    row: list[float] = np.where(
        wanted > known[-1], beyond, np.interp(wanted, known, values)
    ).tolist()
    return row


class Latencies:
    """The predicted seconds of a model's stages; the caller serialises the calls.

    One factor, ``speed``, corrects all predictions: the running mean of observed times divided by
    the running mean of predicted times. A profile comes from the machine that compiled the bundle,
    and no profile contains the cost of a batch outside of its graph (forming the batch, copies,
    Python). Such a cost may double the time of a short stage, but hardly changes the time of a long
    stage; so stages are weighted by their predicted time.

    ``stages``, ``going_on`` and ``unanswered`` are the arguments of the full model's
    :class:`StageTable`; ``smaller`` are the tables of the model's variants 1, 2 …, for the same
    batch sizes (SuperServe 4.1: l_φ(B)). The correction belongs to the machine, so observations of
    one variant apply to all.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[float]],
        going_on: Sequence[float] | None = None,
        *,
        unanswered: Sequence[float] | None = None,
        smaller: Sequence[StageTable] = (),
    ) -> None:
        self.variants = (StageTable(stages, going_on, unanswered), *smaller)
        """Table of each variant; the first is the full model's."""
        self.stages = self.variants[0].stages
        """Number of stages of the full model."""
        self.max_batch_size = self.variants[0].max_batch_size
        largest = [table.max_batch_size for table in self.variants]
        if len(set(largest)) > 1:
            raise ValueError(
                f"the variants' tables reach up to batches of {largest}; use the same batch sizes "
                "for all"
            )
        self.speed = 1.0
        """Observed divided by predicted time; above 1, stages are slower than predicted."""
        self.spread = 0.0
        """Mean absolute deviation of a stage's observed time from its usual time, divided by its
        predicted time."""
        self._predicted_s = 0.0
        """Mean predicted time of a stage; 0 before the first observation."""
        self._stage_speeds = [[0.0] * table.stages for table in self.variants]
        """Mean ``speed`` of each stage of each variant; 0 before the stage's first observation."""
        self._given_up = 0
        """Samples dropped since a stage was last observed."""
        self._usual_speed = 1.0
        self.merging_s = 0.0
        """Seconds that merging buffered batches takes in addition to the run; a running mean."""

    @property
    def shrinking(self) -> Shrinking:
        """Costs of full-model batches that shrink at the recently observed rates."""
        return self.variants[0].shrinking

    @property
    def earliest_s(self) -> float:
        """Seconds in which a single row of the fastest variant could leave at its first exit."""
        return min(table.shrinking.earliest_s for table in self.variants) * self.speed

    @property
    def profiled_s(self) -> tuple[tuple[float, ...], ...]:
        """[stages][max_batch_size + 1]: the full model's seconds as profiled, uncorrected."""
        return tuple(tuple(row) for row in self.variants[0].seconds)

    def predicts_as(self, other: Latencies) -> bool:
        """Return whether ``other`` is made from the same profiled seconds, for all variants."""
        return [t.seconds for t in self.variants] == [t.seconds for t in other.variants]

    def last(self, variant: int) -> int:
        """Return the last stage of a variant."""
        return self.variants[variant].stages - 1

    @property
    def latency_margin(self) -> float:
        """Factor on predictions for decisions in which late is worse than early.

        It is the mean plus some deviations, as in TCP's retransmission timeout (RFC 6298). A batch
        whose mean time equals the slack would be late every other time.
        """
        return self.speed + _DEVIATIONS * self.spread

    def calibrate(self, speed: float) -> None:
        """Set :attr:`speed` (observed divided by predicted time) before the first request."""
        self.speed = self._usual_speed = min(max(speed, _FASTEST), _SLOWEST)

    def stage_s(self, stage: int, batch_size: int, variant: int = 0) -> float:
        """Return the predicted seconds that a stage takes for a batch."""
        return self.variants[variant].seconds[stage][batch_size] * self.speed

    def wasted_s(self, stage: int, batch_size: int, variant: int = 0) -> float:
        """Return the seconds by which a batch exceeds its share of a full batch's time."""
        full = self.max_batch_size
        seconds = self.variants[variant].seconds[stage]
        share_s: float = seconds[full] * batch_size / full
        return max(seconds[batch_size] - share_s, 0.0) * self.speed

    def span_s(self, first: int, last: int, batch_size: int, variant: int = 0) -> float:
        """Return the seconds from the start of stage ``first`` to the end of stage ``last``."""
        until = self.variants[variant].until
        before = until[first - 1][batch_size] if first else 0.0
        return (until[last][batch_size] - before) * self.speed

    def until_s(self, last: int, variant: int = 0) -> Sequence[float]:
        """Return the profiled, uncorrected seconds until a stage's end: [max_batch_size + 1]."""
        return self.variants[variant].until[last]

    def largest_batch(self, last: int, slack_s: float, variant: int = 0) -> int:
        """Return the largest batch that finishes stage ``last`` within ``slack_s``; 0 if none."""
        until_s = self.variants[variant].until[last]
        return max(bisect_right(until_s, slack_s / self.latency_margin) - 1, 0)

    def largest_shrinking_batch(self, slack_s: float) -> int:
        """Return the largest batch whose mean time to the full model's answer fits the slack.

        It is at least 1 if a single row can leave at some exit in time, and 0 otherwise.
        """
        slack_s /= self.latency_margin
        if slack_s < self.shrinking.earliest_s:
            return 0
        return max(bisect_right(self.shrinking.answer_s, slack_s) - 1, 1)

    def observe_shrinking(
        self,
        stage: int,
        before: int,
        survivors: int,
        variant: int = 0,
        unanswered: tuple[int, int] | None = None,
    ) -> None:
        """Record how many rows of a batch went on after a stage: see :meth:`StageTable.observe`."""
        self.variants[variant].observe(stage, before, survivors, unanswered)

    def observe(self, stage: int, batch_size: int, elapsed_s: float, variant: int = 0) -> None:
        """Correct predictions by the measured time of a stage."""
        self._given_up = 0
        predicted_s = self.variants[variant].seconds[stage][batch_size]
        if predicted_s > 0.0:
            ratio = min(max(elapsed_s / predicted_s, _FASTEST), _SLOWEST)
            stage_speeds = self._stage_speeds[variant]
            usual = stage_speeds[stage] or ratio
            stage_speeds[stage] = usual + _MEMORY * (ratio - usual)
            before_s = self._predicted_s or predicted_s
            self._predicted_s = before_s + _MEMORY * (predicted_s - before_s)
            weight = _MEMORY * predicted_s / self._predicted_s
            self.spread += weight * (abs(ratio - usual) - self.spread)
            self.speed += weight * (ratio - self.speed)

    def observe_merged(
        self, stage: int, batch_size: int, elapsed_s: float, variant: int = 0
    ) -> None:
        """Record the time of a stage whose batch had to be merged first."""
        extra_s = max(elapsed_s - self.stage_s(stage, batch_size, variant), 0.0)
        self.merging_s += _MEMORY * (extra_s - self.merging_s)

    def invalidate(self) -> None:
        """Record that a sample was dropped because of a prediction.

        If every sample is dropped, no stage is observed. Wrong predictions, from a time when the
        machine was busy with something else, would then stay. Therefore, after many drops without
        an observation, predictions move back towards the usual speed.
        """
        self._given_up += 1
        if self._given_up <= _PATIENCE:
            return
        self.speed += _MEMORY * (self._usual_speed - self.speed)
        self.spread -= _MEMORY * self.spread
