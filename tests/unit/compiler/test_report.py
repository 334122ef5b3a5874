"""The report says what is so, in every shape that a bundle can have, and trusts no name."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offramp.bundle import (
    NEVER,
    ActiveExit,
    Answer,
    Exit,
    ExitPolicy,
    Head,
    Manifest,
    Profile,
    Promise,
    Segment,
    TensorSpec,
)
from offramp.bundle.schema.manifest import Calibration, Source
from offramp.bundle.schema.parts import HeadScore
from offramp.calibration.choose.exit_records import ExitRecords
from offramp.calibration.choose.selection import certified_policy
from offramp.certify import tuning_path
from offramp.commands.svg import LogScale, Scale, element, nice_logs, nice_values
from offramp.compiler.graphs.weights import WeightSizes
from offramp.compiler.report import numbers, render_report
from offramp.compiler.report.charts import coverage, latency_rows
from offramp.compiler.report.figures import PolicyFigures, savings_curve
from offramp.compiler.report.route import segment_edges, spread
from offramp.compiler.report.words import own_bounds

HOSTILE = """<script>alert("1")</script>'&amp;{{ 7 * 7 }}\u202e"""
BATCH_SIZES = (1, 4, 8)


@dataclass(frozen=True)
class Parts:
    manifest: Manifest
    policy: ExitPolicy
    profile: Profile
    certify: ExitRecords

    def page(self) -> str:
        return render_report(self.manifest, self.policy, self.profile, self.certify)

    def without_policy(self) -> Parts:
        return replace(self, policy=ExitPolicy(version=1, active=()))


def make(exits: int = 3, *, samples: int = 2000, labels: bool = True, name: str = "tiny") -> Parts:
    """A consistent bundle of ``exits`` exits, all in use that a certificate allows."""
    certify = make_records(exits, samples, labels=labels)
    profile = Profile(
        device=f"cpu of {name}",
        threads=2,
        batch_sizes=BATCH_SIZES,
        source_ms=tuple(float(b * (exits + 1)) for b in BATCH_SIZES),
        segments_ms=tuple(tuple(map(float, BATCH_SIZES)) for _ in range(exits + 1)),
        exits_ms=tuple(tuple(0.01 * b for b in BATCH_SIZES) for _ in range(exits)),
        stages_ms=((0.02, 0.03, 0.04),) * exits,
    )
    empty = ExitPolicy(version=1, active=())
    parts = Parts(make_manifest(exits, certify, name), empty, profile, certify)
    if not exits:
        return parts
    rows = range(exits)
    policy = certified_policy(
        rows,
        tuning_path(certify.confidence, certify.agrees),
        certify.confidence,
        certify.agrees,
        PolicyFigures.of(parts.manifest, empty, profile, certify).cost(8),
        max_disagreement=0.02,
        confidence_level=0.95,
    )
    return replace(parts, policy=policy)


def make_records(exits: int, samples: int, *, labels: bool) -> ExitRecords:
    rng = np.random.default_rng(exits)
    skill = np.linspace(1.0, 3.0, exits)[:, None]
    margin = 2 * skill - 5.6 * rng.beta(1.2, 2.0, samples) + rng.normal(0, 0.4, (exits, samples))
    final = rng.integers(0, 5, samples).astype(np.int32)
    right = rng.random((exits, samples)) < 1 / (1 + np.exp(-3 * margin))
    return ExitRecords(
        confidence=(0.2 + 0.8 / (1 + np.exp(-2.5 * margin))).astype(np.float32),
        prediction=np.where(right, final, (final + 1) % 5).astype(np.int32),
        final_prediction=final,
        final_confidence=np.full(samples, 0.9, np.float32),
        labels=np.where(rng.random(samples) < 0.9, final, 0).astype(np.int64) if labels else None,
    )


def make_manifest(exits: int, certify: ExitRecords, name: str) -> Manifest:
    labels = certify.labels
    trial = HeadScore(
        head=Head(kind="grid", grid=2), agreement=0.8125, cost_ms=0.0123, net_savings=0.3333
    )
    built = tuple(
        Exit(
            index=i,
            after_segment=i,
            file=f"exits/{i:02d}.onnx",
            inputs=(f"cut {i} {name}",),
            output=f"exit {i}",
            confidence=f"exit {i}/confidence",
            head=Head(kind="grid", grid=4, hidden=64),
            agreement=float(certify.agrees[i].mean()),
            accuracy=None if labels is None else float((certify.prediction[i] == labels).mean()),
            trials=(trial, replace(trial, head=Head(kind="grid", grid=4, hidden=64))),
        )
        for i in range(exits)
    )
    return Manifest(
        name=name,
        created_utc="2026-01-02T03:04:05+00:00",
        tools={"onnx": "1.99.9", "python": name},
        source=Source(
            file="source.onnx", original_name=f"{name}.onnx", original_sha256="ab" * 32, opset=17
        ),
        inputs=(TensorSpec(name=f"in {name}", dtype="float32", shape=("batch", 16)),),
        outputs=(TensorSpec(name="out", dtype="float32", shape=("batch", 5)),),
        answer=Answer(output="out", classes=5, form="logits"),
        segments=tuple(
            Segment(
                index=i,
                file=f"segments/{i:02d}.onnx",
                inputs=(f"cut {i - 1} {name}" if i else f"in {name}",),
                output="out" if i == exits else f"cut {i} {name}",
                flops_share=1 / (exits + 1),
            )
            for i in range(exits + 1)
        ),
        exits=built,
        calibration=Calibration(
            data_sha256="cd" * 32,
            train_samples=12000,
            tune_samples=3000,
            certify_samples=len(certify.final_prediction),
            sample_shapes={f"in {name}": (16,)},
            reference_batch_size=8,
            source_accuracy=(
                None if labels is None else float((certify.final_prediction == labels).mean())
            ),
        ),
        verified_tolerance=1e-5,
    )


def exact() -> Parts:
    """Two exits and ten samples, small enough to count by hand.

    Exit 0 (threshold 0.9) answers 4 samples, 1 of them wrongly; exit 1 (threshold 0.5) answers 4
    of the others, all rightly; 2 run to the end.
    """
    base = make(2, samples=10, labels=False)
    final = np.zeros(10, np.int32)
    wrong = np.zeros(10, np.int32)
    wrong[0] = 1
    confidence = np.array([[0.95] * 4 + [0.1] * 6, [0.8] * 8 + [0.3] * 2], np.float32)
    certify = ExitRecords(
        confidence=confidence,
        prediction=np.stack([wrong, final]),
        final_prediction=final,
        final_confidence=np.ones(10, np.float32),
        labels=np.array([0] * 9 + [1], np.int64),
    )
    active = (ActiveExit(exit=0, threshold=0.9), ActiveExit(exit=1, threshold=0.5))
    return replace(base, certify=certify, policy=ExitPolicy(version=1, active=active))


class Page(HTMLParser):
    """Checks that every element is closed in order; collects elements and text."""

    VOID = frozenset({"meta", "link", "br", "hr", "img", "input"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), f"<{tag}> repeats an attribute"
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"[ \n]+", " ", " ".join(self.words))

    def classes(self, tag: str) -> list[str]:
        return [attrs.get("class") or "" for name, attrs in self.seen if name == tag]

    def knots(self) -> list[str]:
        """The model's exits as drawn in the row of segments."""
        return [c for c in self.classes("circle") if "knot" in c.split()]


@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("exits", [0, 1, 3, 30])
@pytest.mark.parametrize("active", [True, False])
def test_page_is_well_formed_and_stands_alone(exits: int, labels: bool, active: bool) -> None:
    parts = make(exits, labels=labels)
    source = (parts if active else parts.without_policy()).page()
    page = Page(source)
    assert source.startswith("<!doctype html>")
    assert "http" not in source.lower().replace('http-equiv="', "")
    assert not re.search(r"url\(|@import|@font-face", source)
    loads = {"src", "href", "srcset", "data", "xlink:href", "action"}
    assert not [tag for tag, attrs in page.seen if loads & attrs.keys()]
    assert not {"link", "script", "img", "iframe", "object"} & {tag for tag, _ in page.seen}
    body = source[source.index("</style>") :]
    assert not re.search(r"\bnan\b|\binf\b|None|Undefined", body)
    assert "prefers-color-scheme: dark" in source
    assert len(page.knots()) == exits


@pytest.mark.parametrize("exits", [0, 1, 30])
def test_drawings_stay_inside_their_boxes(exits: int) -> None:
    for number in re.findall(r'\b(?:x|cx|x1|x2|width)="(-?[\d.]+)"', make(exits).page()):
        assert -10 <= float(number) <= 1080


def test_headline_is_the_promise() -> None:
    parts = make(3)
    promise = Promise(
        max_disagreement=0.015,
        confidence_level=0.9,
        certify_samples=2000,
        certify_errors=21,
        p_value=0.0456,
        predicted_savings=0.4321,
    )
    text = Page(replace(parts, policy=replace(parts.policy, promise=promise)).page()).text
    active = len(parts.policy.active)
    assert f"{active} exits in use are predicted to save 43.2\u202f% of the model's time" in text
    assert (
        "at most 1.5\u202f% of the answers differ from those of the unmodified model: certified "
        "with 90\u202f% confidence on 2,000 certify samples with 21 errors." in text
    )
    assert "with probability 0.046 at most, below the 0.1 allowed" in text
    assert "98.95\u202f% agreement" in text
    assert "constraint 1.5\u202f%" in text
    assert "shipped: 43.2\u202f% saved," in text


def test_counts_and_predictions_by_hand() -> None:
    parts = exact()
    found = PolicyFigures.of(parts.manifest, parts.policy, parts.profile, parts.certify)
    assert found.shares.tolist() == [0.4, 0.4, 0.2]
    assert found.agreement == 0.9
    # sample 0 is answered wrongly by exit 0, sample 9 by the model itself
    assert found.accuracy == 0.8
    # batch of 8: 8 ms a segment, 0.08 a head, 0.04 a stage
    by_hand = 0.4 * 8.12 + 0.4 * 16.24 + 0.2 * 24.24
    assert found.predicted_ms(8) == pytest.approx(by_hand, rel=1e-12)
    row = latency_rows(found)[2]
    assert (row.batch_size, row.source_ms, row.source_sample_ms) == (8, 24.0, 3.0)
    assert row.predicted_sample_ms == pytest.approx(by_hand / 8, rel=1e-12)
    assert row.savings == pytest.approx(1 - by_hand / 24, rel=1e-12)
    text = Page(parts.page()).text
    assert f"2 exits in use are predicted to save {numbers.percent(1 - by_hand / 24)}" in text
    assert "20.0\u202f% of the certify split ran to the model's end" in text
    assert "90.00\u202f% agreement" in text


def test_a_policy_without_promise_causes_a_warning() -> None:
    page = Page(exact().page())
    assert "This policy was not certified." in page.text
    assert "certified with" not in page.text
    assert "No point of it is certified." in page.text


def test_shares_and_savings_are_those_of_the_certificate() -> None:
    parts = make(3)
    promise = parts.policy.promise
    assert promise is not None
    found = PolicyFigures.of(parts.manifest, parts.policy, parts.profile, parts.certify)
    assert round((1 - found.agreement) * promise.certify_samples) == promise.certify_errors
    computed = 1 - found.predicted_ms(8) / 32
    assert computed == pytest.approx(promise.predicted_savings, abs=1e-12)


def test_marked_point_lies_on_the_curve_when_the_path_is_the_same() -> None:
    parts = make(3)  # its path was fitted on the certify split, like the curve's
    found = PolicyFigures.of(parts.manifest, parts.policy, parts.profile, parts.certify)
    disagreement, saved = savings_curve(found, found.active)
    at = np.flatnonzero(np.isclose(disagreement, found.disagreement, atol=1e-12))
    assert np.abs(saved[at] - found.predicted_savings).min() < 1e-9


@pytest.mark.parametrize(("repeated", "few"), [(False, False), (True, True)])
def test_classes_whose_bound_is_tested_twice_need_more_samples(repeated: bool, few: bool) -> None:
    """A class needs 59 samples for 5 % at 95 %, and 72 if copies allow a second test."""
    parts = make(3)
    promise = parts.policy.promise
    assert promise is not None
    policy = replace(parts.policy, promise=replace(promise, max_class_disagreement=0.05))
    final = parts.certify.final_prediction % 5
    final[final == 4] = 0
    final[:65] = 4
    copies = np.ones(len(final), np.int64) if repeated else None
    certify = replace(parts.certify, final_prediction=final, copies=copies)
    found = PolicyFigures.of(parts.manifest, policy, parts.profile, certify)
    assert ("but not for" in own_bounds(found)) == few


def test_without_active_exits_a_warning_is_printed() -> None:
    page = Page(make(3).without_policy().page())
    assert "No exit is active: this bundle serves the unmodified model." in page.text
    assert "3 exits were built, but no policy both saved time" in page.text
    assert "warning" in page.classes("div")
    assert page.knots() == ["knot idle"] * 3
    assert "predicted to save" not in page.text
    assert "with exits (predicted)" not in page.text
    assert "shipped" not in page.text
    assert "No point of it is certified." in page.text


def test_no_exit_built() -> None:
    page = Page(make(0).page())
    assert "No exit was worth building" in page.text
    assert "0 of 0 exits in use" in page.text
    assert "Savings against the constraint" not in page.text
    assert "unmodified model (profiled)" in page.text


def test_one_exit_reads_well() -> None:
    page = Page(make(1).page())
    assert "1 exit in use is predicted to save" in page.text
    assert page.knots() == ["knot"]


def test_threshold_never_is_not_in_use() -> None:
    parts = make(3)
    first, *rest = parts.policy.active
    never = replace(first, threshold=NEVER)
    page = Page(replace(parts, policy=replace(parts.policy, active=(never, *rest))).page())
    assert page.knots() == ["knot idle", "knot", "knot"]
    assert page.text.count("not in use") >= 1


def test_accuracy_only_with_labels() -> None:
    assert "Accuracy" in Page(make(2).page()).text
    without = Page(make(2, labels=False).page()).text
    assert "ccuracy" not in without


def test_table_has_exits_and_trials() -> None:
    parts = make(3)
    text = Page(parts.page()).text
    for exit_ in parts.manifest.exits:
        assert numbers.percent(exit_.agreement, 2) in text
        assert f"E{exit_.index}" in text
    for active in parts.policy.active:
        assert numbers.threshold(active.threshold) in text
    assert text.count("2 heads trained to the end") == 3
    assert text.count("4×4 grid, hidden 64 · chosen") == 3
    assert "81.25\u202f% 0.0123 33.3\u202f%" in text
    assert "0.0800 0.0400" in text  # head and border of an exit, at batch 8


def test_rows_have_a_cell_for_every_column() -> None:
    source = make(3).page()
    table = source[source.index("<h2>Exits</h2>") :]
    heads = re.findall(r"<thead>(.*?)</thead>", table, re.DOTALL)
    trial = re.search(r'<tr class="chosen">(.*?)</tr>', table, re.DOTALL)
    end = re.search(r'<tr class="total">(.*?)</tr>', table, re.DOTALL)
    assert trial is not None
    assert end is not None
    cells = [len(re.findall(r"<t[dh]\b", row)) for row in (*heads[:2], end[1], trial[1])]
    assert cells == [9, 4, 9, 4]


def test_every_kind_of_figure_is_labelled() -> None:
    text = Page(make(3).page()).text
    for words in (
        "Head, ms profiled",
        "Border, ms profiled",
        "Agreement counted",
        "Net savings alone predicted, tuning split",
        "unmodified model (profiled)",
        "with exits (predicted)",
        "With exits, ms per sample predicted",
        "No figure on this page was measured while serving.",
        "The curve is descriptive",
        "Only the marked policy's disagreement is certified",
    ):
        assert words in text


def test_facts() -> None:
    text = Page(make(3).page()).text
    for words in (
        "onnx 1.99.9",
        "Training split 12,000 samples",
        "Tuning split 3,000 samples",
        "Certify split 2,000 samples",
        "cd" * 32,
        "ab" * 32,
        "1e-05 (relative)",
        "Threads 2",
        "Profiled on cpu of tiny",
        "in tiny: float32 [batch, 16]",
        "2026-01-02T03:04:05+00:00",
    ):
        assert words in text


def test_room_of_weights_is_counted_where_they_share_a_file() -> None:
    parts = make(3)
    for sizes, told in (
        (WeightSizes(file_bytes=3 << 19, graph_bytes=5 << 19), True),
        (WeightSizes(file_bytes=0, graph_bytes=0), False),
        (None, False),
    ):
        text = Page(
            render_report(parts.manifest, parts.policy, parts.profile, parts.certify, weights=sizes)
        ).text
        words = (
            "Large weights 1.5\u202fMiB in weights.bin, each once; in every graph that has "
            "them they would be 2.5\u202fMiB (counted)"
        )
        assert (words in text) == told
        assert ("Large weights" in text) == told


def test_hostile_names_are_text() -> None:
    source = make(3, name=HOSTILE).page()
    page = Page(source)
    assert "<script" not in source
    assert HOSTILE in page.text
    assert "49" not in re.findall(r"alert\(.*?\u202e", page.text)[0]
    titles = [attrs["title"] for _, attrs in page.seen if "title" in attrs]
    assert f"cut 0 {HOSTILE}" in titles


def test_names_that_are_no_text_can_be_written() -> None:
    source = make(1, name="caf\udce9").page()
    assert b"caf?" in source.encode()


def test_parts_of_another_bundle_are_refused() -> None:
    three, two = make(3), make(2)
    with pytest.raises(ValueError, match="3 exits, the records have 2"):
        replace(three, certify=two.certify).page()
    profile = replace(three.profile, segments_ms=three.profile.segments_ms[:2])
    with pytest.raises(ValueError, match="4 segments, but the profile has 2"):
        replace(three, profile=profile).page()


def test_same_parts_same_page() -> None:
    assert make(3).page() == make(3).page()


def test_coverage_lets_equal_confidences_leave_together() -> None:
    confidence = np.repeat(np.array([0.9, 0.8, 0.7], np.float32), 20)
    agrees = np.ones(60, bool)
    agrees[25] = agrees[45] = agrees[46] = False
    shares, agreement = coverage(confidence, agrees)
    np.testing.assert_allclose(shares, [1 / 3, 2 / 3, 1])
    np.testing.assert_allclose(agreement, [1, 39 / 40, 57 / 60])


def test_coverage_of_few_samples_ends_at_all_of_them() -> None:
    shares, agreement = coverage(np.array([0.5, 0.4], np.float32), np.array([True, False]))
    assert shares.tolist() == [1.0]
    assert agreement.tolist() == [0.5]


def test_segments_are_as_wide_as_their_time() -> None:
    parts = make(1)
    times = ((1.0, 1.0, 3.0), (1.0, 1.0, 1.0))
    profile = replace(parts.profile, segments_ms=times)
    assert segment_edges(
        PolicyFigures.of(parts.manifest, parts.policy, profile, parts.certify)
    ) == [
        0.0,
        0.75,
        1.0,
    ]


@given(
    st.lists(
        st.tuples(st.floats(0, 1000), st.floats(1, 30)),
        min_size=1,
        max_size=30,
    )
)
def test_labels_never_overlap_and_stay_inside(labels: list[tuple[float, float]]) -> None:
    wanted = sorted(place for place, _ in labels)
    widths = [width for _, width in labels]
    places = spread(wanted, widths, 0, 1000)
    boxes = [(p - w / 2, p + w / 2) for p, w in zip(places, widths, strict=True)]
    assert boxes[0][0] >= -1e-6
    assert boxes[-1][1] <= 1000 + 1e-6
    assert all(b[0] >= a[1] - 1e-6 for a, b in pairwise(boxes))


def test_labels_with_room_stay_where_they_belong() -> None:
    assert spread([100, 200, 300], [50, 50, 50], 0, 400) == [100, 200, 300]


@pytest.mark.parametrize(
    ("share", "decimals", "expected"),
    [
        (0.7364, 1, "73.6\u202f%"),
        (1.0, 1, "100.0\u202f%"),
        (0.99996, 1, "99.9\u202f%"),
        (0.999999, 2, "99.99\u202f%"),
        (0.0, 1, "0.0\u202f%"),
        (0.00001, 1, "<\u202f0.1\u202f%"),
        (-0.0321, 1, "−3.2\u202f%"),
        (-0.00001, 1, "0.0\u202f%"),
    ],
)
def test_percent_never_claims_all_or_nothing(share: float, decimals: int, expected: str) -> None:
    assert numbers.percent(share, decimals) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.911, "0.911"), (0.0, "0.000"), (1.0, "1.000"), (0.99998, "0.999980"), (0.9951, "0.9951")],
)
def test_threshold_below_one_stays_below_one(value: float, expected: str) -> None:
    assert numbers.threshold(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"), [(1.7, "1.70"), (0.02333, "0.0233"), (123.4, "123"), (0.0, "0")]
)
def test_milliseconds(value: float, expected: str) -> None:
    assert numbers.milliseconds(value) == expected


def test_elements_escape() -> None:
    made = element("text", "<&>", class_='"x"', stroke_width=1.5, x=None)
    assert str(made) == '<text class="&#34;x&#34;" stroke-width="1.5">&lt;&amp;&gt;</text>'


def test_scale_and_ticks() -> None:
    scale = Scale(low=0, high=2, start=100, end=300)
    assert [scale(0), scale(1), scale(2)] == [100, 200, 300]
    assert nice_values(0, 1, 4) == [0, 0.25, 0.5, 0.75, 1]
    np.testing.assert_allclose(nice_values(-0.02, 0.04, 6), np.arange(-2, 5) / 100, atol=1e-15)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (3.2, 22, [2, 5, 10, 20, 50]),
        (50, 99, [50, 100]),
        (2, 2, [2, 5]),
        (10, 10, [10, 20]),
        (1.9, 640, [1, 10, 100, 1000]),
        (0.03, 0.3, [0.02, 0.05, 0.1, 0.2, 0.5]),
    ],
)
def test_ticks_of_logarithmic_axes_are_nice_numbers(
    low: float, high: float, ticks: list[float]
) -> None:
    np.testing.assert_allclose(nice_logs(low, high), ticks, rtol=1e-12)
    np.testing.assert_allclose(nice_logs(ticks[0], ticks[-1]), ticks, rtol=1e-12)
    scale = LogScale(low=ticks[0], high=ticks[-1], start=0, end=100)
    middle = (ticks[0] * ticks[-1]) ** 0.5
    np.testing.assert_allclose([scale(v) for v in (ticks[0], middle, ticks[-1])], [0, 50, 100])
