"""Predictions of how long stages take: from a profile, corrected by what is observed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from offramp.bundle import Profile
from offramp.certify import MODEL_END, FloatArray
from offramp.engine.scheduling.stage_table import Shrinking, StageTable

_MEMORY = 1 / 32
"""Weight of one observation in the running means."""
_DEVIATIONS = 2.0
"""Mean absolute deviations that a prediction with a margin is above the mean."""
_PATIENCE = 256
"""Samples given up in a row, with nothing run, until predictions are no longer trusted."""
_FASTEST, _SLOWEST = 1 / 16, 16.0
"""Bounds of the correction: beyond them an observation says that something else went on."""


def stage_seconds(
    profile: Profile,
    stages: Sequence[tuple[int, int, int | None]],
    max_batch_size: int,
    *,
    overhead_s: float = 0.0,
) -> tuple[tuple[float, ...], ...]:
    """Predict the stages of a plan, in order, at every batch size up to ``max_batch_size``.

    Each is its first and last segment, and the exit that it ends with (or ``None``, or
    ``MODEL_END``). Between the sizes of the profile is interpolated, beyond the largest the cost of
    its last step goes on. ``overhead_s`` is what whoever runs a stage spends on it besides,
    whatever the size. Gives [stages][max_batch_size + 1] seconds by batch size; index 0 is 0. A
    stage of the source model as a whole costs what the source model does; each stage with an exit
    costs its head and one border more.
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
    """Interpolate; never falling, since a fuller batch can be padded from a smaller one."""
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

    One factor, ``speed``, corrects all predictions: the running mean of observed times over that of
    predicted ones. A profile comes from the machine that compiled, and what a batch costs besides
    its graph (forming it, copies, Python) is in no profile. Such a cost may double a short stage
    and is little to a long one; so a stage counts by the time that was predicted for it.

    ``stages``, ``going_on`` and ``unanswered`` are those of the full model's :class:`StageTable`;
    ``smaller`` are the tables of its variants 1, 2 …, for batches as large (SuperServe 4.1:
    l_φ(B)). The correction is the machine's, so what one variant teaches holds for all.
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
        """The table of each variant; the first is the full model's."""
        self.stages = self.variants[0].stages
        """Of the full model."""
        self.max_batch_size = self.variants[0].max_batch_size
        largest = [table.max_batch_size for table in self.variants]
        if len(set(largest)) > 1:
            raise ValueError(
                f"the variants' tables reach up to batches of {largest}; give all the same sizes"
            )
        self.speed = 1.0
        """Observed over predicted; above 1 is slower."""
        self.spread = 0.0
        """Mean absolute deviation of a stage's observed time from what is usual for it, over the
        predicted one."""
        self._predicted_s = 0.0
        """Mean predicted time of a stage; 0 before any was observed."""
        self._stage_speeds = [[0.0] * table.stages for table in self.variants]
        """Means of each stage of each variant; 0 before it was observed."""
        self._given_up = 0
        """Samples given up since a stage was last observed."""
        self._usual_speed = 1.0
        self.merging_s = 0.0
        """Seconds that merging buffered batches costs beyond running the result; a running mean."""

    @property
    def shrinking(self) -> Shrinking:
        """The costs of batches of the full model that shrink on their way as they did lately."""
        return self.variants[0].shrinking

    @property
    def profiled_s(self) -> tuple[tuple[float, ...], ...]:
        """[stages][max_batch_size + 1]: the full model's seconds as profiled, uncorrected."""
        return tuple(tuple(row) for row in self.variants[0].seconds)

    def predicts_as(self, other: Latencies) -> bool:
        """Whether both were made of the same profiled seconds, of all variants."""
        return [t.seconds for t in self.variants] == [t.seconds for t in other.variants]

    def last(self, variant: int) -> int:
        """The last stage of a variant."""
        return self.variants[variant].stages - 1

    @property
    def latency_margin(self) -> float:
        """The factor on predictions where being late is worse than being early.

        As TCP sets its retransmission timeout (RFC 6298): the mean, and some deviations more. A
        batch that takes just as long as there is slack, in the mean, is late every other time.
        """
        return self.speed + _DEVIATIONS * self.spread

    def calibrate(self, speed: float) -> None:
        """Say what observed over predicted is on this machine, before anything was served."""
        self.speed = self._usual_speed = min(max(speed, _FASTEST), _SLOWEST)

    def stage_s(self, stage: int, batch_size: int, variant: int = 0) -> float:
        """Seconds of one stage."""
        return self.variants[variant].seconds[stage][batch_size] * self.speed

    def wasted_s(self, stage: int, batch_size: int, variant: int = 0) -> float:
        """Seconds that the empty places of a batch cost: beyond its share of a full one's."""
        full = self.max_batch_size
        seconds = self.variants[variant].seconds[stage]
        share_s: float = seconds[full] * batch_size / full
        return max(seconds[batch_size] - share_s, 0.0) * self.speed

    def span_s(self, first: int, last: int, batch_size: int, variant: int = 0) -> float:
        """Seconds from the start of stage ``first`` to the end of stage ``last``."""
        until = self.variants[variant].until
        before = until[first - 1][batch_size] if first else 0.0
        return (until[last][batch_size] - before) * self.speed

    def until_s(self, last: int, variant: int = 0) -> Sequence[float]:
        """[max_batch_size + 1]: seconds until the end of a stage as profiled, uncorrected."""
        return self.variants[variant].until[last]

    def largest_batch(self, last: int, slack_s: float, variant: int = 0) -> int:
        """Most rows that have run stage ``last`` within ``slack_s``; 0 if not even one is."""
        until_s = self.variants[variant].until[last]
        return max(bisect_right(until_s, slack_s / self.latency_margin) - 1, 0)

    def largest_shrinking_batch(self, slack_s: float) -> int:
        """Most rows whose answers, the full model's, come in the mean within ``slack_s``.

        A single row is tried as long as it could leave somewhere in time; 0 if it could not.
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
        """Take note of how many rows went on from a stage: see :meth:`StageTable.observe`."""
        self.variants[variant].observe(stage, before, survivors, unanswered)

    def observe(self, stage: int, batch_size: int, elapsed_s: float, variant: int = 0) -> None:
        """Take note of how long a stage took."""
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
        """Take note of how long a stage took whose batch had to be merged first."""
        extra_s = max(elapsed_s - self.stage_s(stage, batch_size, variant), 0.0)
        self.merging_s += _MEMORY * (extra_s - self.merging_s)

    def invalidate(self) -> None:
        """Say that a sample was given up because of a prediction.

        Whoever gives up everything observes nothing; were the last observations wrong (the
        machine was busy with something else), it would give up for ever. So once many were given
        up and no stage was observed, predictions move back towards the usual speed.
        """
        self._given_up += 1
        if self._given_up <= _PATIENCE:
            return
        self.speed += _MEMORY * (self._usual_speed - self.speed)
        self.spread -= _MEMORY * self.spread
