"""Scenarios by name: each is a sequence of segments between which the distribution shifts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from benchmarks.adapt.corruptions import PixelRange, channel_axis, corrupt
from benchmarks.adapt.sequence import Population, ShiftSegment

from offramp.bundle import Bundle
from offramp.calibration.choose.exit_records import record_answers
from offramp.calibration.data.dataset import Dataset
from offramp.certify import BoolArray, FloatArray
from offramp.engine.stages.answering_graphs import answering_graphs
from offramp.tools.bench.common.bench_flags import look_up

EASY: Final = 0.8
"""Share of the data that counts as easy: the mix that E3 found in practice (5)."""
_DOMINANT: Final = 0.9
"""Share of a segment's samples that belong to its preferred classes."""
_LEAST_GROUP: Final = 20
"""Smallest number of samples that a group must have, so that samples can be drawn from it."""


RecordAnswers: TypeAlias = Callable[[Dataset], Population]
"""Function that records the answers of every exit to the samples of a data set."""
_Progress: TypeAlias = Callable[[int], None]


def answering(bundle: Bundle, *, threads: int) -> Callable[[Dataset, _Progress], Population]:
    """Return a function that records a bundle's answers to a data set.

    It runs the model and all its exits, used or not, as one graph. It answers every sample at every
    exit, calls back with the number of samples of each batch, and raises DataError if the model
    fails on a sample.
    """
    manifest = bundle.manifest
    outputs = [(e.output, e.confidence) for e in manifest.exits]
    graphs = answering_graphs(manifest, bundle.read)

    def record(dataset: Dataset, progress: _Progress) -> Population:
        found = record_answers(
            graphs, outputs, manifest.answer, dataset, threads=threads, progress=progress
        )
        return Population(
            confidence=found.confidence,
            prediction=found.prediction,
            final=found.final_prediction,
            labels=found.labels,
        )

    return record


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioSettings:
    """Settings that all scenarios share: lengths of segments, shifts of the data, and the seed."""

    samples: int
    """Number of samples in each segment."""
    corruption: str
    severity: int
    """Severity of ``abrupt``, and the last severity of ``corruption``."""
    seed: int


class ScenarioData:
    """Data sets by name, and the model's answers to them, which are computed once.

    Most scenarios use the first data set.
    """

    def __init__(
        self, datasets: Mapping[str, Dataset], record: RecordAnswers, settings: ScenarioSettings
    ) -> None:
        self.settings = settings
        self._datasets = datasets
        self._record = record
        self._known: dict[tuple[str, int], Population] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the data sets from which scenarios draw samples."""
        return tuple(self._datasets)

    @property
    def has_images(self) -> bool:
        """True if exactly one input has images."""
        return len(self._images()) == 1

    def population(self, name: str | None = None, *, severity: int = 0) -> Population:
        """Return the answers to a data set (default: the first), corrupted at a severity above
        0."""
        name = self.names[0] if name is None else name
        key = (name, severity)
        if key not in self._known:
            self._known[key] = self._record(self._corrupted(name, severity))
        return self._known[key]

    def _corrupted(self, name: str, severity: int) -> Dataset:
        dataset = self._datasets[name]
        if not severity:
            return dataset
        if not self.has_images:
            raise ValueError(
                "corruptions need a model with one input of images, [n, channels, height, width], "
                "[n, height, width, channels] or [n, height, width]; choose other scenarios"
            )
        (image,) = self._images()
        clean = dataset.inputs[image]
        rng = np.random.default_rng([self.settings.seed, severity])
        kind = self.settings.corruption
        worse = corrupt(clean, kind, severity, range_=PixelRange.of(clean), rng=rng)
        inputs = {**dataset.inputs, image: worse}
        return Dataset(inputs=inputs, labels=dataset.labels, sha256=dataset.sha256)

    def _images(self) -> list[str]:
        first = self._datasets[self.names[0]]
        return [name for name, array in first.inputs.items() if _holds_images(array.shape)]


_Make: TypeAlias = Callable[[ScenarioData], Sequence[ShiftSegment]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A way in which the distribution shifts."""

    description: str
    """One line, for help and report."""
    segments: _Make
    applies: Callable[[ScenarioData], bool] = lambda _: True
    needs: str = ""
    """Requirement of the scenario, printed if the data do not meet it."""


def scenarios_of(names: Sequence[str], material: ScenarioData) -> dict[str, Scenario]:
    """Return the scenarios with these names; ``all`` stands for all that fit the data.

    Raise ValueError if a named scenario does not fit.
    """
    if tuple(names) == ("all",):
        return {name: s for name, s in SCENARIOS.items() if s.applies(material)}
    found = look_up("scenario", names, SCENARIOS)
    for name, scenario in found.items():
        if not scenario.applies(material):
            raise ValueError(f"scenario {name!r} does not fit this data: {scenario.needs}")
    return found


def is_easy(population: Population) -> BoolArray:
    """Return bool[m]: true for easy samples, whose share is :data:`EASY`.

    Easy samples have the surest right early answers. Samples are ranked by the highest confidence
    among the exits in the model's first half that answer like the model.
    """
    early = max(1, population.exits // 2)
    right = np.where(population.agrees[:early], population.confidence[:early], 0.0)
    hardest_first = np.argsort(right.max(axis=0), kind="stable")
    easy = np.ones(len(population), np.bool_)
    easy[hardest_first[: round((1 - EASY) * len(population))]] = False
    return easy


def _difficulty(material: ScenarioData) -> list[ShiftSegment]:
    population = material.population()
    easy = is_easy(population)
    return [
        _segment(
            material,
            f"{round(100 * share)}:{round(100 - 100 * share)}",
            population,
            _mix({"easy samples": easy, "hard samples": ~easy}, share),
        )
        for share in (0.8, 0.5, 0.2)
    ]


def _classes(material: ScenarioData) -> list[ShiftSegment]:
    population = material.population()
    classes = population.final if population.labels is None else population.labels
    middle = int(np.unique(classes)[len(np.unique(classes)) // 2])
    lower = np.asarray(classes < middle)
    lowest, highest = int(classes.min()), int(classes.max())
    groups = {
        f"mostly {lowest}–{middle - 1}": {"lower classes": lower, "upper classes": ~lower},
        f"mostly {middle}–{highest}": {"upper classes": ~lower, "lower classes": lower},
    }
    return [
        _segment(material, "all classes", population),
        *(
            _segment(material, name, population, _mix(parts, _DOMINANT))
            for name, parts in groups.items()
        ),
    ]


def _corruption(material: ScenarioData) -> list[ShiftSegment]:
    kind, worst = material.settings.corruption, material.settings.severity
    steps = [(f"{kind} {severity}", severity) for severity in range(1, worst + 1)]
    return _corrupted(material, [("clean", 0), *steps])


def _abrupt(material: ScenarioData) -> list[ShiftSegment]:
    kind, worst = material.settings.corruption, material.settings.severity
    return _corrupted(material, [("clean", 0), (f"{kind} {worst}", worst), ("clean again", 0)])


def _corrupted(material: ScenarioData, steps: Sequence[tuple[str, int]]) -> list[ShiftSegment]:
    return [
        _segment(material, name, material.population(severity=severity)) for name, severity in steps
    ]


def _domain(material: ScenarioData) -> list[ShiftSegment]:
    return [_segment(material, name, material.population(name)) for name in material.names]


_ONE_INPUT: Final = "it needs a model with exactly one input of images"

SCENARIOS: Final[Mapping[str, Scenario]] = {
    "difficulty": Scenario(
        description="easy to hard samples 80:20, 50:50, 20:80 (E3, 5.4); easy are the "
        f"{EASY:.0%} that exits of the first half answer most surely and rightly",
        segments=_difficulty,
    ),
    "classes": Scenario(
        description=f"all classes, then the lower half of them in {_DOMINANT:.0%} of the samples, "
        "then the upper half",
        segments=_classes,
    ),
    "corruption": Scenario(
        description="images that get worse step by step",
        segments=_corruption,
        applies=lambda material: material.has_images,
        needs=_ONE_INPUT,
    ),
    "abrupt": Scenario(
        description="clean images, corrupted ones, clean ones",
        segments=_abrupt,
        applies=lambda material: material.has_images,
        needs=_ONE_INPUT,
    ),
    "domain": Scenario(
        description="one data set after another",
        segments=_domain,
        applies=lambda material: len(material.names) > 1,
        needs="give --data twice or more",
    ),
}


def _segment(
    material: ScenarioData, name: str, population: Population, weights: FloatArray | None = None
) -> ShiftSegment:
    """Return a segment of a population; by default all samples are equally likely."""
    even = np.full(len(population), 1.0 / len(population))
    return ShiftSegment(
        name=name,
        population=population,
        weights=even if weights is None else weights,
        samples=material.settings.samples,
    )


def _mix(groups: Mapping[str, BoolArray], share: float) -> FloatArray:
    """Return weights with ``share`` for the first of two groups, uniform within each group."""
    for name, members in groups.items():
        if members.sum() < _LEAST_GROUP:
            raise ValueError(
                f"the data has {members.sum()} {name}, too few to draw from (expected at least "
                f"{_LEAST_GROUP}); pass more data or choose other scenarios"
            )
    first, second = groups.values()
    return np.asarray(share * first / first.sum() + (1 - share) * second / second.sum())


def _holds_images(shape: tuple[int, ...]) -> bool:
    try:
        channel_axis(shape)
    except ValueError:
        return False
    return True
