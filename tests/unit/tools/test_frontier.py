"""``python -m benchmarks.frontier``: pairs of bundles, policies at bounds, what combining gains."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from benchmarks.frontier import __main__ as frontier_command
from benchmarks.frontier.__main__ import main
from benchmarks.frontier.measurement import gain_of
from benchmarks.frontier.policies import (
    BOTH,
    DESCRIPTIONS,
    EXITS,
    INT8_CERTIFIED,
    SOURCE,
    BundlePair,
    choose_policies,
)
from benchmarks.frontier.report import describe_gain, print_frontier, to_json
from rich.console import Console
from tests.facts import Told, tells
from tests.unit.bundle import examples
from tests.unit.tools.frontier_cases import (
    certified,
    frontier,
    point,
    records,
    without_bound,
    write_fp32,
    write_int8,
)

from offramp.bundle import ExitPolicy
from offramp.bundle.files import dump
from offramp.certify import samples_needed
from offramp.tools.bench.common.bench_flags import shares


@pytest.fixture
def pair(tmp_path: Path) -> BundlePair:
    return BundlePair(exits=write_fp32(tmp_path), cascade=write_int8(tmp_path))


def test_the_order_of_the_two_bundles_does_not_matter(pair: BundlePair) -> None:
    assert BundlePair.of(pair.exits, pair.cascade) == pair
    assert BundlePair.of(pair.cascade, pair.exits) == pair
    assert pair.bundle_of(EXITS) is pair.exits
    assert pair.bundle_of(BOTH) is pair.bundle_of(INT8_CERTIFIED) is pair.cascade


def test_each_system_has_a_policy_of_its_own_bundle(pair: BundlePair) -> None:
    """With 1,000 samples in each split confident exits are right."""
    found = choose_policies(pair, (0.01, 0.02), 0.95)
    assert [(f.system, f.max_disagreement) for f in found] == [
        (system, bound) for bound in (0.01, 0.02) for system in (INT8_CERTIFIED, EXITS, BOTH)
    ]
    for one in found:
        assert one.reason is None
        assert one.policy is not None
        promise = one.policy.promise
        assert promise is not None
        assert (promise.max_disagreement, promise.confidence_level) == (one.max_disagreement, 0.95)
        assert promise.certify_samples == 1000
    by_name = {f.system: f.policy for f in found if f.max_disagreement == 0.02}
    active = {n: [a.exit for a in p.active] for n, p in by_name.items() if p is not None}
    assert active[INT8_CERTIFIED] == [1]  # the copy's own answer
    assert active[EXITS] == [0]
    assert active[BOTH] == [0, 1]


def test_what_cannot_be_certified_says_why(tmp_path: Path, pair: BundlePair) -> None:
    few = choose_policies(pair, (0.001,), 0.95)
    needed = samples_needed(0.001, 0.95)
    for one in few:
        assert one.policy is None
        assert "1000 certify samples are too few" in (one.reason or "")
        assert f"{needed} are the least" in (one.reason or "")
    wrong = replace(pair, exits=write_fp32(tmp_path / "wrong", known=(0.0,)))
    reasons = {f.system: f.reason for f in choose_policies(wrong, (0.02,), 0.95)}
    assert reasons[BOTH] is None
    assert "no head agrees enough" in (reasons[EXITS] or "")


def test_a_bundle_without_exits_says_so(tmp_path: Path, pair: BundlePair) -> None:
    bare = examples.write(
        tmp_path,
        manifest=replace(examples.MANIFEST, name="bare", exits=()),
        policy=ExitPolicy(version=1, active=()),
        files={
            "source.onnx": examples.graph("the source"),
            "segments/00.onnx": examples.graph("first half"),
            "segments/01.onnx": examples.graph("second half"),
            "profiles/cpu.json": dump(replace(examples.PROFILE, exits_ms=(), stages_ms=())),
            "records.npz": records(()),
        },
        overwrite=True,
    )
    found = choose_policies(replace(pair, exits=bare), (0.02,), 0.95)
    reasons = {f.system: f.reason for f in found}
    tells(reasons[EXITS], f"{bare.path}", "no exits")
    assert reasons[BOTH] is None


def test_both_are_compared_with_the_better_one_alone() -> None:
    """Ratios are taken in the same rounds: the medians of each would have another ratio."""
    rounds = {EXITS: (4.0, 4.0, 8.0), INT8_CERTIFIED: (9.0,) * 3, BOTH: (2.0, 3.0, 2.0)}
    systems = [without_bound(SOURCE, replace(point(1, 1.0, 0.0), round_busy_ms=(10.0,) * 3))]
    for name, busy_ms in rounds.items():
        ratio = float(np.median(busy_ms)) / 10
        systems.append(certified(name, 0.01, replace(point(1, ratio, 0), round_busy_ms=busy_ms)))
    found = gain_of(systems, 0.01, 1)
    assert found is not None
    assert found.better == EXITS
    assert found.measured_ratio.value == 0.5
    assert found.measured_ratio.half_width == pytest.approx((0.75 - 0.25) / 2)
    assert describe_gain(found) == "×0.50 ± 0.25 at batch 1 (the better alone: exits)"
    assert gain_of(systems, 0.02, 1) is None


def test_the_source_model_stands_for_what_is_not_certified_or_slower() -> None:
    """Exits alone have no policy at the lower bound, and the copy is slower at batch 16."""
    better = {(g.max_disagreement, g.batch_size): g for g in frontier().gains}
    assert better[0.005, 1].better == INT8_CERTIFIED
    assert better[0.005, 1].measured_ratio.value == pytest.approx(0.75)
    assert better[0.005, 16].better == SOURCE
    assert better[0.005, 16].measured_ratio.value == pytest.approx(0.9)
    assert better[0.02, 1].better == better[0.02, 16].better == EXITS


def test_without_a_policy_of_both_there_is_nothing_to_gain() -> None:
    systems = [s for s in frontier().systems if s.system != BOTH]
    systems.append(certified(BOTH, 0.02, reason="none"))
    assert gain_of(systems, 0.02, 1) is None


def test_the_document_keeps_apart_what_is_certified_predicted_and_measured() -> None:
    document = to_json(frontier(disturbed=("it was busy",)))
    assert set(document) == {"systems", "gains", "disturbed"}
    both = document["systems"][-1]
    assert both["system"] == BOTH
    assert both["description"] == DESCRIPTIONS[BOTH]
    assert both["max_disagreement"] == both["policy"]["promise"]["max_disagreement"] == 0.02
    assert both["predicted_ratio"] == {1: 0.25}
    assert [m["batch_size"] for m in both["measured"]] == [1, 16]
    assert both["measured"][0]["busy"] == {"value": 0.3, "half_width": 0.01}
    assert both["measured"][0]["disagreement"] == 0.015
    nothing = document["systems"][3]
    assert (nothing["policy"], nothing["measured"]) == (None, ())
    assert nothing["reason"] == "too <few> samples"
    assert document["disturbed"] == ["it was busy"]


def test_the_tables_say_what_is_what() -> None:
    told = io.StringIO()
    print_frontier(
        Console(file=told, width=100), frontier(disturbed=("it was [busy]",)), title="m.onnx",
        baseline="source model (plain)", confidence_level=0.95,
    )  # fmt: skip
    said = told.getvalue()
    lines = [line.split() for line in said.splitlines()]
    first, second = (i for i, line in enumerate(lines) if line[:1] == ["m.onnx,"])
    cells = {tuple(line[:2]): line for line in lines[first:second]}
    assert cells["source", "2"] == ["source", "2", "1", "1", "0.00%", "90.00%", "–", "–"]
    assert cells["int8", "1"][-2:] == ["–", "uncertified"]
    figures = " ".join(cells["0.5%", INT8_CERTIFIED][2:])
    assert figures == "1.6 0.80 ± 0.01 0.80 0.40% 90.00% 0.25 4 of 1000"
    assert cells["exits", "not"] == ["exits", "not", "certified"]
    words = " ".join(said.split())
    assert "median over 6 rounds ± half of its 95 % interval" in words
    assert "Predicted, not measured: predicted ×" in words
    assert "bound 0.5%: ×0.75 ± 0.00 at batch 1 (the better alone: int8-certified)" in words
    assert "exits at 0.5%: not certified. too <few> samples." in words
    assert "The machine was disturbed: it was [busy]." in words
    assert all(f"{name}: {text}"[:40] in words for name, text in DESCRIPTIONS.items())


def test_few_rounds_have_no_interval() -> None:
    few = replace(point(1, 1.0, 0.0), round_busy_ms=(2.0,) * 5)
    found = frontier(systems=(without_bound(SOURCE, few),), gains=())
    assert found.describe_width().startswith("median over 5 rounds ± half of their range")


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Return the command's message when it refuses, before it reads any data."""
    assert main([*map(str, arguments), "--data", "none.npz"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def test_without_the_other_bundle_it_says_how_to_make_it(
    pair: BundlePair, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, pair.cascade.path)
    assert "OTHER is missing" in said
    command = "eecompile m.onnx --data CALIBRATION.npz --precision fp32 --output small_int8_fp32.ee"
    assert said.endswith(f"{command}\n")
    assert "--precision int8 --output small_int8.ee" in refused(capsys, pair.exits.path)


def test_two_bundles_of_one_precision_are_refused(
    pair: BundlePair, capsys: pytest.CaptureFixture[str]
) -> None:
    for one, other in ((pair.exits, "int8"), (pair.cascade, "fp32")):
        said = refused(capsys, one.path, one.path)
        tells(said, one.manifest.precision, f"{one.path}", "fp32 and one of int8")
        assert f"--precision {other} --output" in said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"source": replace(examples.MANIFEST.source, original_sha256="2" * 64)},
            ("m.onnx", "2222222222222222", "m.onnx", "0000"),
        ),
        (
            {"inputs": (replace(examples.MANIFEST.inputs[0], dtype="float32"),)},
            ("image: float32 [batch, 1, 28, 28]", "image: uint8"),
        ),
        ({"answer": replace(examples.MANIFEST.answer, form="probabilities")}, ("answer",)),
    ],
)
def test_bundles_of_different_models_are_refused(
    tmp_path: Path,
    pair: BundlePair,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    message: Told,
) -> None:
    other = write_fp32(tmp_path / "other", manifest=replace(examples.MANIFEST, **changes))
    said = refused(capsys, pair.cascade.path, other.path)
    tells(said, *message)
    assert "both bundles must be of one model" in said


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (["--confidence", "95"], ("--confidence 95", "between 0 and 1", "0.95")),
        (["--seed", "-1"], ("--seed -1", "at least 0")),
        (["--json", "no/such/folder.json"], ("there is no folder no/such",)),
        (["--html", "no/such/page.html"], ("there is no folder no/such",)),
    ],
)
def test_values_that_make_no_sense_are_refused(
    pair: BundlePair, capsys: pytest.CaptureFixture[str], value: list[str], message: Told
) -> None:
    both = (pair.cascade.path, pair.exits.path)
    tells(refused(capsys, *both, *value), *message)


@pytest.mark.parametrize("text", ["0.005,1", "0", "-0.1", "nan", "1,2"])
def test_bounds_are_shares(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with pytest.raises(SystemExit):
        main(["b.ee", "--data", "d.npz", "o.ee", f"--bounds={text}"])
    tells(capsys.readouterr().err, "between 0 and 1", "0.01")


def test_bounds_rise_and_are_different() -> None:
    assert shares("0.02,0.005,0.02") == (0.005, 0.02)


def test_it_runs_on_the_cpu_alone(
    tmp_path: Path,
    pair: BundlePair,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[bool] = []
    other = SimpleNamespace(name="tensorrt", close=lambda: closed.append(True))
    monkeypatch.setattr(frontier_command, "make_backend", lambda *_, **__: other)
    data = tmp_path / "data.npz"
    np.savez(data, image=np.zeros((8, 1, 28, 28), np.uint8))
    how = ["--batch-sizes", "1", "--rounds", "1", "--data", str(data)]
    paths = [str(pair.cascade.path), str(pair.exits.path)]
    assert main([*paths, *how]) == 1
    assert "not on tensorrt; add --backend onnxruntime" in capsys.readouterr().err
    assert closed == [True]


def test_it_says_where_the_bundles_are_of_different_data() -> None:
    told = io.StringIO()
    facts = {"data_is_calibration_data": False, "same_calibration_data": False}
    frontier_command._warn(Console(file=told), facts)
    assert told.getvalue().startswith("The two bundles were calibrated on different data")
