"""The answers of a bundle's model and all its exits to data sets, by the graphs that are served."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from offramp.bundle import Bundle
from offramp.calibration.dataset import Dataset
from offramp.calibration.records import record_answers
from offramp.engine.assembly import assemble
from offramp.tools.bench.adapt.sequence import Population


class Recorder:
    """Runs model and exits as one graph over data; keeps nothing."""

    def __init__(self, bundle: Bundle, *, threads: int) -> None:
        """Join the parts of a bundle, whether its policy uses them or not."""
        manifest = bundle.manifest
        self._answer = manifest.answer
        self._outputs = [(e.output, e.confidence) for e in manifest.exits]
        files = [*(s.file for s in manifest.segments), *(e.file for e in manifest.exits)]
        wanted = [*itertools.chain(*self._outputs), self._answer.output]
        self._graph = assemble([bundle.read(file) for file in files], wanted)
        self._threads = threads

    def record(
        self, dataset: Dataset, progress: Callable[[int], None] = lambda _: None
    ) -> Population:
        """Answer every sample at every exit.

        Raises:
            DataError: The model fails on a sample.
        """
        answers = record_answers(
            self._graph,
            self._outputs,
            self._answer,
            dataset,
            threads=self._threads,
            progress=progress,
        )
        return Population(
            confidence=answers.confidence,
            prediction=answers.prediction,
            final=answers.final_prediction,
            labels=answers.labels,
        )
