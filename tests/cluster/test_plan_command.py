"""``eecompile plan``: what it reads of a bundle, what it prints, and what it refuses."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from tests.facts import Told, facts, tells

from offramp.bundle import Bundle, write_bundle
from offramp.cluster.command.page import draw_plan, render_plan
from offramp.cluster.command.plan_command import PlanOptions, plan_bundle
from offramp.cluster.planning.batch_profile import BatchProfile, ProfileWindow, dump_batch_profile
from offramp.cluster.planning.cluster import ModelFacts
from offramp.cluster.planning.cluster_plan import (
    ClusterPlan,
    PlanError,
    PlannedSplit,
    Replicas,
    parse_plan,
)
from offramp.compiler.commands.cli import main
from offramp.engine.common.control_state import identity_of

BUNDLE = Path(__file__).parents[1] / "golden" / "bundle"
CLUSTER = """
[devices.fast]
count = 4
cost_per_hour = 3.0
speed = 4.0

[devices.slow]
count = 8
cost_per_hour = 0.5
speed = 1.0

[link]
gbit_per_s = 10
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "1000")
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER)
    return path


def test_sizes_that_the_manifest_has_are_taken(cluster: Path) -> None:
    old = Bundle.open(BUNDLE)
    segments = [
        replace(segment, row_bytes=0 if segment.index == 12 else 5, weight_bytes=segment.index)
        for segment in old.manifest.segments
    ]
    names = [e.path for e in old.manifest.files if e.path != "policy.json"]
    bundle = write_bundle(
        cluster.parent / "sized.ee",
        replace(old.manifest, segments=tuple(segments)),
        old.policy,
        {name: old.read(name) for name in names},
    )
    model = plan_bundle(PlanOptions(bundle=bundle.path, cluster=cluster)).model
    assert (model.row_bytes, model.weight_bytes) == ((5,) * 12, tuple(range(13)))


def test_the_shares_are_those_of_the_certify_split(cluster: Path) -> None:
    planned = plan_bundle(PlanOptions(bundle=BUNDLE, cluster=cluster))
    bundle = Bundle.open(BUNDLE)
    records, active = bundle.records(), bundle.policy.active
    assert planned.model.exit_names == tuple(a.exit for a in active)
    chosen = records["split"] == 2
    staying = np.ones(int(chosen.sum()), np.bool_)
    for share, exit_ in zip(planned.model.going_on, active, strict=True):
        staying &= records["confidence"][exit_.exit][chosen] < np.float32(exit_.threshold)
        assert share == pytest.approx(staying.mean())


def test_the_plan_is_printed_as_predicted_beside_the_model_and_written(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["plan", str(BUNDLE), "--cluster", str(cluster), "--json", "plan.json"])
    out = capsys.readouterr().out
    assert status == 0
    assert "PREDICTED: batches of" in out
    assert "without queues; nothing ran on these devices" in out
    assert "Model as it is:" in out
    assert "Limit: the devices of split 0" in out
    assert "Shares of rows that continue: from the bundle's certify split." in out
    plan = parse_plan(Path("plan.json").read_text())
    assert plan == plan_bundle(PlanOptions(bundle=BUNDLE, cluster=cluster)).result.plan
    predicted = json.loads(Path("plan.json").read_text())["predicted"]
    assert f"Plan:            {predicted['rate_rps']:,.0f} rows/s" in out


def test_an_objective_that_binds_is_said_to(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(BUNDLE), "--cluster", str(cluster), "--slo-ms", "2"]) == 0
    out = capsys.readouterr().out
    assert "Limit: the SLO of 2 ms less 20%; without it, batches of 32:" in out


def test_a_rate_is_served_at_the_least_cost(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(BUNDLE), "--cluster", str(cluster), "--rate", "800"]) == 0
    out = capsys.readouterr().out
    assert "the plan costs 50% less" in out
    assert "Limit: the rate of 800 rows/s, which nothing cheaper serves" in out


def test_what_was_observed_replaces_the_records(cluster: Path) -> None:
    exits = len(Bundle.open(BUNDLE).manifest.exits)
    decided = (100, *(50,) * (exits - 1))
    window = ProfileWindow(start_s=0.0, decided=decided, went_on=(50,) * exits)
    profile = BatchProfile(window_s=120.0, exits=exits, windows=(window,) * 30)
    path = cluster.parent / "observed.json"
    path.write_text(dump_batch_profile(profile))
    planned = plan_bundle(PlanOptions(bundle=BUNDLE, cluster=cluster, batch_profile=path))
    assert planned.model.going_on == pytest.approx((0.5,) * len(planned.model.exit_after))
    assert planned.shares_from.startswith("a conservative forecast (")
    spans = "quantile 0.8) of 30 windows of 120 s, 1970-01-01 00:00 to 00:02 UTC, in "
    assert planned.shares_from.endswith(f"{spans}{path}")
    identity = identity_of(Bundle.open(BUNDLE))["bundle"]
    path.write_text(dump_batch_profile(profile, identity))
    assert plan_bundle(PlanOptions(bundle=BUNDLE, cluster=cluster, batch_profile=path))
    path.write_text(dump_batch_profile(profile, "00" * 32))
    with pytest.raises(PlanError, match=facts("'0", "expected '", "use")):
        plan_bundle(PlanOptions(bundle=BUNDLE, cluster=cluster, batch_profile=path))
    path.write_text(dump_batch_profile(BatchProfile(window_s=120.0, exits=1)))
    with pytest.raises(PlanError, match=facts("1 exits", f"{exits}")):
        plan_bundle(PlanOptions(bundle=BUNDLE, cluster=cluster, batch_profile=path))


def test_the_method_of_the_forecast_may_be_chosen(
    cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exits = len(Bundle.open(BUNDLE).manifest.exits)
    windows = [
        ProfileWindow(start_s=120.0 * n, decided=(100,) * exits, went_on=(share,) * exits)
        for n, share in enumerate((80, 80, 80, 80, 80, 80, 80, 20))
    ]
    profile = BatchProfile(window_s=120.0, exits=exits, windows=tuple(windows))
    path = cluster.parent / "observed.json"
    path.write_text(dump_batch_profile(profile))
    options = PlanOptions(bundle=BUNDLE, cluster=cluster, batch_profile=path)
    found = {
        name: plan_bundle(replace(options, forecast=name)) for name in (None, "last", "ewma", "ar")
    }
    assert found[None].model == found["last"].model
    assert "(last value, quantile" in found[None].shares_from
    assert "(EWMA, quantile" in found["ewma"].shares_from
    assert found["ewma"].model.going_on[0] > found["last"].model.going_on[0], "80 is not forgotten"
    monkeypatch.setitem(sys.modules, "statsmodels.tsa.arima.model", None)
    with pytest.raises(PlanError, match=r"statsmodels.*pip install"):
        plan_bundle(replace(options, forecast="arima"))
    with pytest.raises(PlanError, match=facts("--forecast ewma", "--batch")):
        plan_bundle(replace(options, forecast="ewma", batch_profile=None))


def test_a_profile_of_another_device_is_read_beside_the_cluster_file(cluster: Path) -> None:
    (cluster.parent / "fast.json").write_bytes((BUNDLE / "profiles/cpu.json").read_bytes())
    cluster.write_text(CLUSTER.replace("speed = 4.0", 'profile = "fast.json"'))
    planned = plan_bundle(PlanOptions(bundle=BUNDLE, cluster=cluster))
    fast, slow = planned.cluster.types
    np.testing.assert_array_equal(fast.times.segments_s, slow.times.segments_s)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--slo-ms", "0.1"], ("eecompile: latency", "faster")),
        (["--rate", "1e9"], ("eecompile: rate", "more")),
        (["--cost-factor", "0.01"], ("eecompile: cost", "at most")),
        (["--cluster", "none.toml"], ("eecompile: none.toml", "No such file")),
        (["--batch-profile", "none"], ("eecompile: none", "No such file")),
    ],
)
def test_what_cannot_be_planned_is_said_in_a_line(
    cluster: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: Told
) -> None:
    assert main(["plan", str(BUNDLE), "--cluster", str(cluster), *arguments]) == 1
    error = capsys.readouterr().err.strip()
    tells(error, *message)
    assert "\n" not in error


@pytest.mark.parametrize("flag", ["--slo-ms", "--rate", "--cost-factor"])
def test_numbers_are_of_more_than_0(
    cluster: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    with pytest.raises(SystemExit):
        main(["plan", str(BUNDLE), "--cluster", str(cluster), flag, "0"])
    assert "'0' is not a number above 0" in capsys.readouterr().err


class Reader(HTMLParser):
    """Collects the tags that are open, the numbers of boxes, and what is loaded from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.boxes: list[dict[str, str | None]] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in {"meta"}:
            self.open.append(tag)
        if tag == "rect":
            self.boxes.append(dict(attrs))
        self.loads += [name for name, _ in attrs if name in {"src", "href"}]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def split_plan(name: str = "gpu") -> tuple[ClusterPlan, ModelFacts]:
    """Half of the rows leave at exit 3; the other half runs on one device, over a link."""
    model = ModelFacts(
        segments=4, exit_after=(0, 1), going_on=(0.9, 0.5), row_bytes=(1e3,) * 3, exits=(2, 3)
    )

    def split(first: int, count: int, share: float, exits: tuple[int, ...]) -> PlannedSplit:
        replicas = Replicas(
            device_type=name, count=count, exits=exits, stage_s=1e-3, longest_s=2e-3
        )
        return PlannedSplit(
            first_segment=first, last_segment=first + 1, replicas=(replicas,), share=share,
            period_s=share * 1e-3 / count, fill_s=0.0, link_s=1e-4 * first,
            link_period_s=2e-4 * first / 2,
        )  # fmt: skip

    splits = (split(0, 1, 1.0, (3,)), split(2, 2, 0.5, ()))
    return ClusterPlan(batch_size=4, splits=splits, cost_per_hour=3.0), model


def test_the_page_is_well_formed_stands_alone_and_says_that_it_is_predicted() -> None:
    plan, model = split_plan()
    page = render_plan("model.ee", plan, plan, model, reasons=["Because."], label="PREDICTED.")
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    assert reader.loads == []
    assert page.count("<em>predicted</em>") == 3
    assert "<p>Because.</p>" in page
    assert "<b>1,000</b>" in page  # rows a second, one batch of one row a millisecond
    assert "<b>4.20 ms</b>" in page  # two stages at worst, and the link
    assert "2 splits, batches of 4" in page


def test_the_drawing_shows_splits_exits_and_how_busy_they_are() -> None:
    plan, model = split_plan()
    picture = str(draw_plan(plan, model))
    assert "Exit 2: off, as it saves no time here; 90.0% of the rows continue" in picture
    assert "Exit 3: on; 50.0% of the rows continue" in picture
    assert "Split 1: busy for 25% of the time" in picture
    assert "Link to split 1: busy for 20% of the time" in picture
    assert "2 × gpu" in picture
    reader = Reader()
    reader.feed(picture)
    for box in reader.boxes:
        x, width = (float(box[key] or "nan") for key in ("x", "width"))
        assert 0 <= x <= x + width <= 1080
    # Four segments, two splits, two bars; the second is a quarter as high as the first.
    assert len(reader.boxes) == 8
    heights = [float(box["height"] or "nan") for box in reader.boxes[-2:]]
    assert heights[1] == pytest.approx(heights[0] / 4)


def test_names_of_devices_are_text() -> None:
    plan, model = split_plan("<b>[red]&")
    page = render_plan("<i>", plan, None, model, reasons=["<u>"], label="")
    assert "&lt;b&gt;[red]&amp;" in page
    assert not re.search("<[iu]>|<b>\\[", page)
    assert "The unmodified model cannot meet this goal" in page


def test_the_command_writes_the_page(cluster: Path) -> None:
    assert main(["plan", str(BUNDLE), "--cluster", str(cluster), "--report", "plan.html"]) == 0
    page = Path("plan.html").read_text(encoding="utf-8")
    assert "Offramp plan" in page
    assert "Limit: the devices of split 0" in page
