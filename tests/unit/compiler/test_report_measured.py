"""Report of a measured policy, and the stored part of it."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tests.unit.bundle.examples import FILES, POLICY, PROFILE, write
from tests.unit.compiler.test_report import Page, exact

from offramp.bundle import Bundle, BundleSchemaError, Measured, MeasuredSize, Profile, Ratio
from offramp.bundle.files import dump
from offramp.bundle.schema.measured import MEASURED
from offramp.compiler.commands.printing import print_bundle
from offramp.compiler.report import render_report
from offramp.compiler.report.words import SavingsCheck, measured_ratios


def measured_size(batch_size: int, busy: float, half_width: float = 0.01) -> MeasuredSize:
    def ratio(value: float) -> Ratio:
        return Ratio(value=value, half_width=half_width)

    return MeasuredSize(
        batch_size=batch_size,
        rounds=12,
        samples=600,
        mean=ratio(0.31),
        median=ratio(0.08),
        busy=ratio(busy),
        nothing_exits=ratio(1.06),
    )


MEASUREMENT = Measured(
    device="cpu",
    threads=1,
    samples=1000,
    agreement=0.99,
    sizes=(measured_size(1, 0.31), measured_size(8, 0.35)),
)


def judged(predicted: float, *, busy: float = 0.35, **changes: Any) -> SavingsCheck:
    measurement = replace(MEASUREMENT, **{"disturbed": (), **changes})
    at = measured_size(8, busy, 0.01)
    return SavingsCheck(measured=measurement, at=at, predicted_savings=predicted, profile=PROFILE)


def test_it_is_kept_as_it_was_made(tmp_path: Path) -> None:
    kept = write(tmp_path, files={**FILES, MEASURED: dump(MEASUREMENT)})
    assert Bundle.open(kept.path).measured() == MEASUREMENT


def test_a_bundle_without_it_is_read(tmp_path: Path) -> None:
    assert write(tmp_path).measured() is None


def test_what_is_not_understood_is_refused(tmp_path: Path) -> None:
    content = dump(MEASUREMENT).replace(b'"agreement"', b'"agrees"')
    bundle = write(tmp_path, files={**FILES, MEASURED: content})
    with pytest.raises(BundleSchemaError, match=r"measured.json: unknown fields \['agrees'\]"):
        bundle.measured()


def test_batch_sizes_must_rise() -> None:
    with pytest.raises(ValueError, match=r"batch sizes \[8, 1\] must increase"):
        replace(MEASUREMENT, sizes=MEASUREMENT.sizes[::-1])


@pytest.mark.parametrize(("reference", "nearest"), [(1, 1), (2, 1), (3, 8), (8, 8), (64, 8)])
def test_judged_is_the_size_nearest_to_the_reference(reference: int, nearest: int) -> None:
    assert MEASUREMENT.nearest(reference).batch_size == nearest


def test_all_ratios_are_in_a_line() -> None:
    assert measured_ratios(MEASUREMENT) == (
        "Measured here on 1,000 samples, as a ratio to the unmodified model: "
        "batch 1: mean 0.31, median 0.08, busy 0.31, nothing exits 1.06; "
        "batch 8: mean 0.31, median 0.08, busy 0.35, nothing exits 1.06."
    )
    assert judged(0.672).describe() == "Predicted savings 67.2%, measured 65.0% ±1.0% (batch 8)."


@pytest.mark.parametrize("predicted", [0.601, 0.65, 0.699])
def test_little_difference_is_not_talked_about(predicted: float) -> None:
    assert judged(predicted).difference is None


PROFILED_BUSY = replace(judged(0.75), profile=replace(PROFILE, disturbed=("a",)))
UNSURE = replace(judged(0.75), at=measured_size(4, 0.35, 0.06))
FLAT = replace(judged(0.75), profile=replace(PROFILE, source_ms=(10.0, 20.0), disturbed=("a",)))
SMALLER_BATCHES = "samples that go on do so in smaller batches, which take longer a sample"


@pytest.mark.parametrize(
    ("found", "points", "reasons"),
    [
        (judged(0.75), "10.0 points less", f"{SMALLER_BATCHES} than the full ones that the"),
        (judged(0.55), "10.0 points more", "the parts take another time together than they took"),
        (
            judged(0.75, disturbed=("a", "b"), threads=2),
            "10.0 points less",
            "the machine was disturbed while this was measured; 2 threads were measured, 1 prof",
        ),
        (
            FLAT,
            "10.0 points less",
            "a batch of 1 takes 50% of the time of one of 8 in this model, so",
        ),
        (PROFILED_BUSY, "10.0 points less", "the machine was disturbed while the parts were prof"),
        (
            UNSURE,
            "10.0 points less",
            "so short a run is accurate to ±6.0 points only; batch 4 was not profiled, batch 8 was",
        ),
    ],
)
def test_a_difference_is_said_with_its_likely_reason(
    found: SavingsCheck, points: str, reasons: str
) -> None:
    said = found.difference
    assert said is not None
    assert said.startswith(
        f"Measured savings are {points} than predicted. Likely reason: {reasons}"
    )
    assert said.endswith(".")


def test_exits_without_savings_cause_a_warning() -> None:
    assert judged(0.3, busy=0.99).warning is None
    said = judged(0.3, busy=1.0).warning
    assert said is not None
    assert said.startswith(
        "At batch 8 the exits in use took 1.00 ± 0.01 of the unmodified model's time, though "
        "30.0% savings were predicted."
    )


class Recorded(Bundle):
    """A bundle whose records are given: half of the certify samples leave at the exit."""

    def records(self) -> dict[str, np.ndarray[Any, Any]]:
        confidence = np.array([[0.95, 0.95, 0.5, 0.5]], np.float32)
        answers = np.zeros(4, np.int32)
        return {
            "confidence": confidence,
            "split": np.full(4, 2, np.uint8),
            "prediction": answers[None],
            "final_prediction": answers,
        }


def summary_of(tmp_path: Path, measured: Measured, profile: Profile = PROFILE) -> list[str]:
    files = {**FILES, MEASURED: dump(measured), "profiles/cpu.json": dump(profile)}
    bundle = write(tmp_path, files=files)
    written = io.StringIO()
    recorded = Recorded(path=bundle.path, manifest=bundle.manifest, policy=bundle.policy)
    print_bundle(recorded, Console(file=written, width=400))
    return written.getvalue().splitlines()[3:]


def test_eecompile_ends_with_what_was_measured(tmp_path: Path) -> None:
    sizes = (measured_size(1, 0.31), measured_size(8, 0.66))
    lines = summary_of(tmp_path, replace(MEASUREMENT, sizes=sizes))
    assert lines[0].startswith("Measured here on 1,000 samples")
    # half leave after 5 + 0.75 ms of 20, half end after 20.75: 33.75 % are saved
    assert lines[1] == "Predicted savings 33.8%, measured 34.0% ±1.0% (batch 8)."
    assert lines[3].startswith("Report: ")


def test_eecompile_ends_loudly_where_nothing_is_saved(tmp_path: Path) -> None:
    sizes = (measured_size(1, 1.31), measured_size(8, 1.02))
    lines = summary_of(tmp_path, replace(MEASUREMENT, sizes=sizes, disturbed=("policy: [busy]",)))
    assert lines[1] == "Predicted savings 33.8%, measured -2.0% ±1.0% (batch 8)."
    assert lines[2].startswith("Measured savings are 35.8 points less than predicted.")
    assert lines[3].startswith("THE EXITS IN USE SAVE NOTHING HERE: At batch 8 the exits in use")
    assert lines[5] == "Disturbed while measuring policy: 1 note in the report"


def test_eecompile_ends_with_one_line_on_all_disturbances(tmp_path: Path) -> None:
    profile = replace(PROFILE, disturbed=("segments: busy", "segments: slower", "[stages]: busy"))
    sizes = (measured_size(1, 0.31), measured_size(8, 0.66))
    measured = replace(MEASUREMENT, sizes=sizes, disturbed=("policy: busy",))
    lines = summary_of(tmp_path, measured, profile)
    told = [line for line in lines if "isturbed" in line or "segments: " in line]
    assert told == ["Disturbed while measuring segments, [stages], policy: 4 notes in the report"]


def page_of(measured: Measured | None) -> Page:
    parts = replace(exact(), policy=POLICY_OF_TWO)
    return Page(
        render_report(parts.manifest, parts.policy, parts.profile, parts.certify, measured=measured)
    )


POLICY_OF_TWO = replace(exact().policy, promise=POLICY.promise)


def test_the_report_shows_what_was_measured() -> None:
    # predicted at batch 8: 1 - (0.4 * 8.12 + 0.4 * 16.24 + 0.2 * 24.24) / 24 = 39.2 %
    sizes = (measured_size(1, 0.63), measured_size(8, 0.62, 0.02))
    text = page_of(replace(MEASUREMENT, sizes=sizes, disturbed=("policy: busy",))).text
    assert "What the policy brings measured on this machine" in text
    assert (
        "At batch 8 the policy saves 38.0\u202f% of the unmodified model's time (measured); "
        in text
    )
    assert "39.2\u202f% were predicted." in text
    assert "38.0\u202f% of the model's time saved, batch 8 measured on this machine" in text
    assert "8 0.31 ± 0.02 0.08 ± 0.02 0.62 ± 0.02 1.06 ± 0.02 12 600" in text
    assert "on 1,000 samples of the certify split, 99.00\u202f% of the answers equal" in text
    assert "Disturbed while measuring: policy: busy." in text
    assert "points less than predicted" not in text


def test_the_report_says_that_prediction_and_measurement_differ() -> None:
    sizes = (measured_size(1, 0.63), measured_size(8, 0.70))
    text = page_of(replace(MEASUREMENT, sizes=sizes)).text
    assert "Measured savings are 9.2 points less than predicted." in text


def test_the_report_warns_of_exits_that_save_nothing() -> None:
    sizes = (measured_size(1, 0.63), measured_size(8, 1.10))
    page = page_of(replace(MEASUREMENT, sizes=sizes))
    assert "warning" in page.classes("div")
    assert "The exits in use save nothing on the machine that measured them." in page.text


def test_a_report_without_it_claims_nothing_measured() -> None:
    text = page_of(None).text
    assert "measured on this machine" not in text
    assert "What the policy brings" not in text
