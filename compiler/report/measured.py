"""What is said of a policy that was measured: in the report, and in eecompile's last lines."""

from __future__ import annotations

from dataclasses import dataclass

from offramp.bundle import Measured, MeasuredSize, Profile, Ratio
from offramp.compiler.report.analysis import Analysis

TOLERATED_DIFFERENCE = 0.05
"""Share of the model's time by which measured savings may differ from predicted ones unsaid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A measurement beside what was predicted, at the batch size nearest to the reference."""

    measured: Measured
    at: MeasuredSize
    predicted_savings: float
    """Share of the model's time, at the same batch size."""
    profile: Profile
    """That it was predicted from."""

    @property
    def savings(self) -> float:
        """Share of the model's time, measured."""
        return 1 - self.at.busy.value

    @property
    def saves_nothing(self) -> bool:
        """Whether the exits in use do not pay."""
        return self.savings <= 0


def figures(measured: Measured) -> str:
    """Give all ratios in a line."""
    sizes = "; ".join(
        f"batch {at.batch_size}: mean {_plain(at.mean)}, median {_plain(at.median)}, "
        f"busy {_plain(at.busy)}, nothing exits {_plain(at.nothing_exits)}"
        for at in measured.sizes
    )
    samples = f"{measured.samples:,} certify sample{'' if measured.samples == 1 else 's'}"
    return f"Measured here on {samples}, as a ratio to the unmodified model: {sizes}."


def savings(judged: Judged) -> str:
    """Set what was predicted beside what was measured."""
    return (
        f"Predicted savings {judged.predicted_savings:.1%}, measured {judged.savings:.1%} "
        f"±{judged.at.busy.half_width:.1%} (batch {judged.at.batch_size})."
    )


def difference(judged: Judged) -> str | None:
    """Say that prediction and measurement differ, and why they may; ``None`` if they do not."""
    apart = judged.savings - judged.predicted_savings
    if abs(apart) <= TOLERATED_DIFFERENCE:
        return None
    direction = "more" if apart > 0 else "less"
    return (
        f"Measured savings are {100 * abs(apart):.1f} points {direction} than predicted. "
        f"Likely reason: {'; '.join(_reasons(judged))}."
    )


def warning(judged: Judged) -> str | None:
    """Say that the exits in use save nothing; ``None`` if they do."""
    if not judged.saves_nothing:
        return None
    return (
        f"At batch {judged.at.batch_size} the exits in use took {ratio(judged.at.busy)} of the "
        f"unmodified model's time, though {judged.predicted_savings:.1%} savings were predicted. "
        "Compile again on a quiet machine, or on the one that serves; eebench compare measures "
        "for longer."
    )


def ratio(found: Ratio) -> str:
    """``0.31 ± 0.01``."""
    return f"{found.value:.2f} ± {found.half_width:.2f}"


def _plain(found: Ratio) -> str:
    return f"{found.value:.2f}"


def _reasons(judged: Judged) -> list[str]:
    """Whatever may explain a difference, the surest first; never empty."""
    measured, at, profile = judged.measured, judged.at, judged.profile
    found = []
    if profile.disturbed:
        found.append("the machine was disturbed while the parts were profiled")
    if measured.disturbed:
        found.append("the machine was disturbed while this was measured")
    if at.busy.half_width > TOLERATED_DIFFERENCE:
        found.append(f"so short a run is sure to ±{100 * at.busy.half_width:.1f} points only")
    if at.batch_size not in profile.batch_sizes:
        other = profile.batch_sizes[profile.column(at.batch_size)]
        found.append(f"batch {at.batch_size} was not profiled, batch {other} stands for it")
    if measured.threads != profile.threads:
        found.append(f"{measured.threads} threads were measured, {profile.threads} profiled")
    if found:
        return found
    if judged.savings < judged.predicted_savings and at.batch_size > 1:
        found.append(
            "samples that go on do so in smaller batches, which take longer a sample than the "
            "full ones that the prediction counts"
        )
        return found
    return ["the parts take another time together than they took when they were profiled"]


def judge(found: Analysis, measured: Measured) -> Judged:
    """Set a measurement beside what is predicted at the same batch size."""
    at = measured.nearest(found.reference)
    return Judged(
        measured=measured,
        at=at,
        predicted_savings=found.savings_at(at.batch_size),
        profile=found.profile,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRow:
    """What was measured at a batch size, as text."""

    batch_size: int
    mean: str
    median: str
    busy: str
    nothing_exits: str
    rounds: int
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredView:
    """The section of the page on what was measured."""

    rows: list[MeasuredRow]
    samples: int
    agreement: float
    threads: int
    batch_size: int
    """That prediction and measurement are compared at."""
    predicted_savings: float
    savings: float
    difference: str | None
    disturbed: tuple[str, ...]


def measured_view(judged: Judged) -> MeasuredView:
    """Put the section of the page together."""
    measured = judged.measured
    rows = [
        MeasuredRow(
            batch_size=at.batch_size,
            mean=ratio(at.mean),
            median=ratio(at.median),
            busy=ratio(at.busy),
            nothing_exits=ratio(at.nothing_exits),
            rounds=at.rounds,
            samples=at.samples,
        )
        for at in measured.sizes
    ]
    return MeasuredView(
        rows=rows,
        samples=measured.samples,
        agreement=measured.agreement,
        threads=measured.threads,
        batch_size=judged.at.batch_size,
        predicted_savings=judged.predicted_savings,
        savings=judged.savings,
        difference=difference(judged),
        disturbed=measured.disturbed,
    )
