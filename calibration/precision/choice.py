"""Chooses the kind of int8 for this machine: each is built, timed with float32, and evaluated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from offramp.calibration.data.dataset import Dataset
from offramp.calibration.data.running import run_over
from offramp.calibration.measure.profiling import TimedGraph
from offramp.calibration.precision.kinds import CpuPrecision, quantise
from offramp.calibration.precision.quantised_graphs import (
    BatchDependence,
    PrecisionError,
    depends_on_batch_mates,
)
from offramp.calibration.precision.static_scales import Range
from offramp.engine.common.timing import (
    Effort,
    Estimate,
    Rounds,
    disturbances,
    repeats_of,
    time_rounds,
)

MOST_RATIO = 0.95
"""Largest allowed ratio of a kind's time to float32's at the largest batch size: smaller savings do
not justify the rounding of a second model."""
EFFORT = Effort(least=8, most=40, seconds=4.0, half_width=0.01)
"""Effort for timing a kind; a model that takes seconds is timed in the fewest rounds."""
_BATCH_MATES = 16
"""Number of samples that are used to check that rows are independent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindMeasured:
    """Measurements of the graph in one CPU precision."""

    kind: CpuPrecision
    ratios: Mapping[int, Estimate]
    """Time relative to the float32 model's in the same round, with its interval, by batch size."""
    agreement: float
    """Share of the samples whose largest class is the same as in float32."""
    samples: int
    """Number of samples that agreement was measured on."""
    dependence: BatchDependence
    size_bytes: int
    """Size of the graph in this precision, in bytes."""

    @property
    def mean_ratio(self) -> float:
        """Geometric mean of the ratios over batch sizes."""
        return float(prod(r.value for r in self.ratios.values()) ** (1 / len(self.ratios)))

    def objection(self, least_agreement: float) -> str | None:
        """Return the reason not to use this kind; ``None`` if there is none."""
        reference = max(self.ratios)
        if self.dependence.depends:
            return (
                f"answers depend on batch mates, by {self.dependence.difference:.1%} of the "
                "largest one"
            )
        if self.agreement < least_agreement:
            return (
                f"agrees with float32 on {self.agreement:.2%} of {self.samples} samples, less "
                f"than {least_agreement:.2%}"
            )
        for size, ratio in self.ratios.items():
            most = MOST_RATIO - ratio.half_width if size == reference else 1 + ratio.half_width
            if ratio.value > most:
                return f"not faster: ratio {_figure(ratio)} at batch {size}"
        return None

    def describe(self) -> str:
        """Return a line that describes the measurements."""
        ratios = ", ".join(f"{_figure(r)} at batch {size}" for size, r in self.ratios.items())
        return (
            f"{self.kind.value}: {ratios} of float32's time, agreement {self.agreement:.2%} on "
            f"{self.samples} samples"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionChoice:
    """The chosen kind of int8, and the measurements of all kinds."""

    kind: CpuPrecision | None
    """Kind of int8 that was chosen; ``None`` if the model stays float32."""
    reason: str
    """Reason for the choice in words, for reports."""
    measured: tuple[KindMeasured, ...]
    not_applicable: Mapping[CpuPrecision, str]
    """Reasons, by kind, why a kind does not apply to this model or does not run here."""
    disturbed: tuple[str, ...]
    """Disturbances of the machine during the measurement."""
    graphs: Mapping[CpuPrecision, bytes] = field(default_factory=dict, repr=False)
    """Model in each kind that may be worth using: the fastest first, then slower ones, each of
    which agrees more often than all before it."""
    ranges: Mapping[str, Range] = field(default_factory=dict, repr=False)
    """Ranges of the tensors that were measured for static kinds."""
    saturating: bool = False
    """True if weights have 7 bits, as :func:`~offramp.calibration.precision.kinds.quantise` makes
    them for a CPU whose int8 saturates."""


def choose_kind(
    graph: bytes,
    answer: str,
    calibration: Dataset,
    judged: Dataset,
    *,
    threads: int,
    least_agreement: float,
    saturating: bool,
    batch_sizes: Sequence[int] = (1, 16),
    kinds: Sequence[CpuPrecision] = tuple(CpuPrecision),
    effort: Effort = EFFORT,
    progress: Callable[[int], None] = lambda _: None,
) -> PrecisionChoice:
    """Build each kind, and choose the fastest that agrees and whose rows are independent.

    One kind at a time is loaded next to float32, both as they are served. The fastest kind has the
    smallest geometric mean of time ratios over the batch sizes.

    Args:
        graph: The float32 source model.
        answer: Its output [rows, classes].
        calibration: Samples that scales are measured on.
        judged: Samples that agreement is measured on (the tune split); at least the largest batch.
        threads: Threads of ONNX Runtime.
        least_agreement: Share of ``judged`` on which a kind has to agree with float32.
        saturating: Whether the CPU's int8 saturates, so that weights must have 7 bits.
        batch_sizes: Rising; the last is the reference.
        kinds: Kinds to try.
        effort: Time to spend on each kind.
        progress: Called with 1 after every kind.
    """
    if len(judged) < max(*batch_sizes, 2):
        raise ValueError(
            f"{len(judged)} samples to compare the kinds on, expected at least the number of "
            f"rows of the largest batch ({max(*batch_sizes, 2)}); pass more samples"
        )
    source = TimedGraph(graph, threads)
    wanted = _classes(graph, answer, judged, threads)
    measured: list[KindMeasured] = []
    ranges: dict[str, Range] = {}
    inapplicable: dict[CpuPrecision, str] = {}
    notes: list[str] = []
    fine: list[tuple[KindMeasured, bytes]] = []
    for kind in kinds:
        try:
            made = quantise(
                graph, calibration, kind, threads=threads, saturating=saturating, ranges=ranges
            )
            loaded = _loaded(made, kind, judged, threads)
        except PrecisionError as error:
            inapplicable[kind] = str(error)
            progress(1)
            continue
        ratios, disturbed = _time(
            (source, loaded),
            judged,
            batch_sizes=batch_sizes,
            effort=effort,
            kind=kind,
        )
        notes += disturbed
        agreeing = _classes(made, answer, judged, threads) == wanted
        result = KindMeasured(
            kind=kind,
            ratios=ratios,
            agreement=float(agreeing.mean()),
            samples=len(judged),
            dependence=depends_on_batch_mates(
                made, judged.take(slice(0, _BATCH_MATES)), answer=answer, threads=threads
            ),
            size_bytes=len(made),
        )
        measured.append(result)
        if result.objection(least_agreement) is None:
            fine.append((result, made))
        progress(1)
    worth = _undominated(fine)
    best = worth[0][0] if worth else None
    return PrecisionChoice(
        kind=best.kind if best else None,
        reason=best.describe() if best else _why_none(measured, inapplicable, least_agreement),
        measured=tuple(measured),
        not_applicable=inapplicable,
        disturbed=tuple(notes),
        graphs={result.kind: made for result, made in worth},
        ranges=ranges,
        saturating=saturating,
    )


def _undominated(fine: Sequence[tuple[KindMeasured, bytes]]) -> list[tuple[KindMeasured, bytes]]:
    """Sort kinds by speed; leave out those that do not agree more often than a faster one."""
    worth: list[tuple[KindMeasured, bytes]] = []
    for result, made in sorted(fine, key=lambda pair: pair[0].mean_ratio):
        if not worth or result.agreement > worth[-1][0].agreement:
            worth.append((result, made))
    return worth


def _loaded(made: bytes, kind: CpuPrecision, samples: Dataset, threads: int) -> TimedGraph:
    """Load a graph and run it once; a ``PrecisionError`` if this ONNX Runtime cannot."""
    try:
        loaded = TimedGraph(made, threads)
        loaded.run(samples.take(slice(0, 1)))
    except Exception as error:  # ONNX Runtime's own classes derive from Exception only
        reason = str(error).splitlines()[0]
        raise PrecisionError(
            f"{kind.value} is not run by ONNX Runtime {ort.__version__} here ({reason}); a newer "
            "one may"
        ) from error
    return loaded


def _time(
    graphs: tuple[TimedGraph, TimedGraph],
    samples: Dataset,
    *,
    batch_sizes: Sequence[int],
    effort: Effort,
    kind: CpuPrecision,
) -> tuple[dict[int, Estimate], tuple[str, ...]]:
    """Return the second graph's times relative to the first's by batch size, and disturbances."""
    batches = [samples.take(slice(0, size)) for size in batch_sizes]
    found = time_rounds(
        [[partial(g.time_ms, batch) for g in graphs] for batch in batches],
        repeats_of(batch_sizes),
        effort,
        _widest,
    )
    ratios = [rounds.ratios()[0] for rounds in found.rounds]
    notes = disturbances(kind.value, found.load, found.rounds)
    return dict(zip(batch_sizes, ratios, strict=True)), notes


def _widest(rounds: Sequence[Rounds]) -> float:
    return max(r.ratios()[0].half_width for r in rounds)


def _classes(graph: bytes, answer: str, dataset: Dataset, threads: int) -> NDArray[np.int64]:
    """Return the largest class of every sample, int64[samples]."""
    batches = run_over(graph, [answer], dataset, threads=threads)
    return np.concatenate([values[0].argmax(axis=1) for _, values in batches])


def _why_none(
    measured: Sequence[KindMeasured],
    inapplicable: Mapping[CpuPrecision, str],
    least_agreement: float,
) -> str:
    """Return why float32 is kept: the objection to each kind, the fastest one first."""
    if not measured:
        return "float32 stays: " + ("; ".join(inapplicable.values()) or "no kind was tried")
    by_speed = sorted(measured, key=lambda result: result.mean_ratio)
    reasons = (f"{r.kind.value}: {r.objection(least_agreement)}" for r in by_speed)
    return "float32 stays: " + "; ".join(reasons)


def _figure(ratio: Estimate) -> str:
    return f"{ratio.value:.2f} ± {ratio.half_width:.2f}"
