"""A plain account of every sample, which the random life of a scheduler is held against."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np
from tests.unit.scheduling.helpers import pairs

from offramp.engine.scheduling import Run
from offramp.engine.scheduling.decisions import RowSet

Sample = tuple[int, int]
"""Request, row."""


class Asked(NamedTuple):
    """A request."""

    key: tuple[float, float, int]
    batch_key: int
    deadline_s: float


class Retry(NamedTuple):
    """A batch that is to be tried again."""

    failed_on: int
    """The stream that it failed on."""
    samples: list[Sample]
    suspect_until_s: float | None
    """Until when it waits for all others, if its one request failed alone."""
    losses: int
    """Workers that it has lost."""


class Origin(NamedTuple):
    """Circumstances of a sample's start."""

    plan: int
    sample_id: int


class Account:
    """Places of all samples that have not left."""

    def __init__(self) -> None:
        self.asked: dict[int, Asked] = {}
        self.place: dict[Sample, str] = {}
        """Queued, running, buffered or retry."""
        self.stage: dict[Sample, int] = {}
        """The last that it ran."""
        self.origin: dict[Sample, Origin] = {}
        """Origins of started samples."""
        self.answered: set[Sample] = set()
        """Samples that run on after their answer."""
        self.started = 0
        """Samples that ever were."""
        self.withdrawn: set[int] = set()
        self.failures: Counter[Sample] = Counter()
        self.interruptions = 0
        """Number of interruptions of samples."""
        self.retries: list[Retry] = []
        self.kept: dict[int, dict[int, Sample]] = {}
        """Buffered and interrupted batches that were not discarded: their samples by position."""

    def under_way(self, *, answered: bool) -> list[Sample]:
        """Samples that were started, with their answer or without."""
        return [sample for sample in self.origin if (sample in self.answered) == answered]

    def waiting(self, request: int, *places: str) -> list[Sample]:
        """Samples of a request in one of these places that have no answer."""
        return [
            sample
            for sample, place in self.place.items()
            if sample[0] == request and place in places and sample not in self.answered
        ]

    def late(self, now_s: float) -> list[Sample]:
        """Samples without an answer that do not run and whose deadline has passed."""
        return [
            sample
            for sample, place in self.place.items()
            if place != "running"
            and sample not in self.answered
            and self.asked[sample[0]].deadline_s <= now_s
        ]

    def gives_up(self, sample: Sample, now_s: float) -> bool:
        """Return True if a running sample below its threshold has to leave."""
        request = sample[0]
        in_vain = request in self.withdrawn or self.asked[request].deadline_s <= now_s
        return in_vain and sample not in self.answered

    def start(self, run: Run) -> None:
        """Take note of a new batch: its samples are numbered on, in the order of its rows."""
        samples = pairs(run)
        assert run.sample_ids.tolist() == list(range(self.started, self.started + len(samples)))
        self.started += len(samples)
        for sample, sample_id in zip(samples, run.sample_ids.tolist(), strict=True):
            self.origin[sample] = Origin(run.plan, sample_id)

    def check_origin(self, run: Run) -> None:
        """A sample keeps the plan that it was started under, and its number."""
        for sample, sample_id in zip(pairs(run), run.sample_ids.tolist(), strict=True):
            assert self.origin[sample] == Origin(run.plan, sample_id)

    def named(self, lost: list[RowSet]) -> list[Sample]:
        """Return the samples reported as lost; check their reports."""
        names: list[Sample] = []
        for samples in lost:
            assert np.isinf(samples.deadlines_s[samples.answered]).all()
            columns = (samples.requests, samples.rows, samples.sample_ids, samples.answered)
            for request, row, sample_id, answered in zip(*columns, strict=True):
                sample = (int(request), int(row))
                assert self.origin[sample].sample_id == sample_id
                assert (sample in self.answered) == answered
                names.append(sample)
        assert len(set(names)) == len(names)
        return names

    def try_again(self, retry: Retry) -> None:
        """A batch is to be tried again from the start."""
        for sample in retry.samples:
            assert retry.suspect_until_s is None or not self.failures[sample], (
                "tried alone, and again"
            )
            self.failures[sample] += 1
            self.place[sample] = "retry"
            del self.stage[sample]
        self.retries.append(retry)

    def interrupt(self, number: int, by_position: dict[int, Sample]) -> None:
        """Samples are to run their last stage once more, from tensors that are kept."""
        self.keep(number, by_position, "interrupted")
        for sample in by_position.values():
            self.stage[sample] -= 1
        self.interruptions += len(by_position)

    def keep(self, number: int, by_position: dict[int, Sample], place: str) -> None:
        """Samples wait at a place, and their tensors are kept."""
        self.kept[number] = by_position
        for sample in by_position.values():
            self.place[sample] = place

    def leave(self, samples: list[Sample]) -> None:
        """Remove finished samples from all places."""
        gone = set(samples)
        left = [r._replace(samples=[s for s in r.samples if s not in gone]) for r in self.retries]
        self.retries = [retry for retry in left if retry.samples]
        for number, by_position in self.kept.items():
            self.kept[number] = {p: s for p, s in by_position.items() if s not in gone}
        for sample in samples:
            del self.place[sample]
            self.stage.pop(sample, None)
            self.origin.pop(sample, None)
            self.answered.discard(sample)
