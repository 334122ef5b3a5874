"""Bundles with variants: what each answers, what is measured of it, and what is promised of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from benchmarks import switching
from benchmarks.switching import NotingBackend
from tests.bundles import sharing_weights
from tests.facts import Told, facts, tells
from tests.served_variants import (
    ROWS,
    Compiled,
    answers_of,
    fixed,
    of,
    own,
    serve,
    with_policies,
)
from tests.unit.engine.serving import until

from offramp.bundle import ActiveExit, Bundle, BundleIntegrityError, ExitPolicy
from offramp.engine.backends import make_backend, onnxruntime
from offramp.engine.backends.onnxruntime import make_session
from offramp.engine.common.errors import OptionsError
from offramp.engine.core import Engine
from offramp.engine.graphs.external_weights import WeightForm
from offramp.engine.models import variants
from offramp.engine.models.options import EngineOptions, ModelOptions
from offramp.engine.models.served_model import scheduler_of
from offramp.engine.requests.results import EngineResult
from offramp.engine.scheduling.policies import PolicyName
from offramp.engine.serving import evidence
from offramp.engine.stages.plan import Mode
from offramp.server.pages.metrics import render_metrics
from offramp.server.pages.status import render_status
from offramp.tools.bench.simulated_model import model_of
from offramp.tools.bench.simulation import SimulatedLoad, simulate


@pytest.fixture(scope="module")
def compiled(with_variants: Path) -> Compiled:
    return Compiled.of(with_variants)


def test_a_bundle_shows_itself_as_each_of_its_variants(compiled: Compiled) -> None:
    bundle = Bundle.open(compiled.bundle.path)
    full, *smaller = bundle.variants()
    assert full == bundle
    assert [v.name for v in bundle.manifest.variants] == ["4 bits", "2 bits"]
    for number, shown in enumerate(smaller, 1):
        assert shown.number == number
        assert shown.manifest.subnet == bundle.manifest.variants[number - 1].name
        assert shown.manifest.is_cascade
        assert shown.manifest.segments[-1].file == "source.onnx"
        exits = len(shown.manifest.exits)
        assert shown.records()["confidence"].shape[0] == exits == len(shown.profile().exits_ms)
        assert shown.manifest.exits[-1].head.kind == "own"
        segment = shown.manifest.segments[0]
        assert segment.file.startswith(f"variants/{number}/segments/")
        assert onnx.load_from_string(shown.read(segment.file)).graph.node
    assert not full.manifest.is_cascade
    agreements = [variant.agreement for variant in bundle.manifest.variants]
    assert agreements == sorted(agreements, reverse=True)


def test_a_variant_answers_what_its_subnet_does(compiled: Compiled) -> None:
    quiet = compiled.quiet
    for number, copy in enumerate(compiled.copies, 1):

        async def body(engine: Engine, number: int = number, copy: bytes = copy) -> None:
            result = await engine.infer("m", compiled.unseen)
            np.testing.assert_allclose(
                answers_of(result), compiled.answers(copy), rtol=1e-4, atol=1e-5
            )
            assert (result.variants == number).all()
            assert (result.exits == own(quiet, number)).all()
            assert result.forced.all(), "nothing is certified of them"
            mine = of(engine).variants[number - 1]
            assert not any(sum(seen.left) for seen in of(engine).departures)
            assert (mine.answered, mine.forced, mine.audited) == (ROWS, ROWS, 0)
            assert engine.model("m").variants == ("4 bits", "2 bits")

        serve(quiet, body, policy=fixed(quiet, number))


@pytest.mark.parametrize(("asked", "least"), [("never", 0), ("auto", 1), ("always", 4)])
def test_a_variant_answers_the_same_however_its_weights_are_in_memory(
    compiled: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, least: int
) -> None:
    """Costs were not measured: ``auto`` shares only the full model that audits run.

    If all share, two variants and the full model without them share too.
    """
    forms: list[WeightForm] = []

    def observed(*given: Any) -> Any:
        forms.append(given[3])
        return make_session(*given)

    monkeypatch.setattr(onnxruntime, "make_session", observed)
    bundle = sharing_weights(compiled.quiet, tmp_path / "named.ee")
    copy = compiled.answers(compiled.copies[0])

    async def body(engine: Engine) -> None:
        result = await engine.infer("m", compiled.unseen)
        assert (result.variants == 1).all()
        np.testing.assert_allclose(
            answers_of(result), copy, rtol=1e-5, atol=1e-5 * np.abs(copy).max()
        )
        shared = forms.count(WeightForm.SHARED)
        assert shared == least if asked != "always" else shared >= least

    serve(bundle, body, policy=fixed(bundle, 1), share_weights=asked)


def test_what_a_variants_certified_exits_answer_is_not_forced(
    compiled: Compiled, tmp_path: Path
) -> None:
    last = own(compiled.bundle, 1)
    sure = ExitPolicy(version=1, active=(ActiveExit(exit=last, threshold=0.5),))
    bundle = with_policies(compiled.bundle, tmp_path / "sure.ee", sure)

    async def body(engine: Engine) -> None:
        result = await engine.infer("m", compiled.unseen)
        assert (result.variants == 1).all()
        assert 0 < result.forced.sum() < ROWS
        assert (result.forced == (result.confidences < 0.5)).all()

    serve(bundle, body, policy=fixed(bundle, 1))


def test_audits_of_variants_run_the_full_model(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything is audited here: the counts are those of the two models run by themselves."""
    monkeypatch.setattr(evidence, "AUDITED_SHARE", 1.0)
    bundle = compiled.quiet
    found: list[EngineResult] = []

    async def body(engine: Engine) -> None:
        found.append(await engine.infer("m", compiled.unseen))
        await until(lambda: of(engine).auditing == 0 and of(engine).in_flight == 0)
        mine = of(engine).variants[1]
        said = answers_of(found[0]).argmax(1)
        assert mine.audited == ROWS
        assert mine.disagreed == int((said != compiled.full.argmax(1)).sum()) > 0
        control = of(engine).control
        assert control is not None
        assert control.observed == 0, "they are no evidence about the full model's exits"
        assert of(engine).lost_feedback == 0
        assert of(engine).out_of_range == 0

    serve(bundle, body, mode=Mode.AUDIT, policy=fixed(bundle, 2), trust_inputs=True)


def test_a_small_share_of_what_variants_answer_is_audited(compiled: Compiled) -> None:
    async def body(engine: Engine) -> None:
        for _ in range(20):
            await engine.infer("m", compiled.unseen)
        await until(lambda: of(engine).auditing == 0)
        assert 0 < of(engine).variants[0].audited < 20 * ROWS / 10

    serve(compiled.quiet, body, mode=Mode.AUDIT, policy=fixed(compiled.quiet, 1))


@pytest.mark.parametrize(
    ("policy", "options", "reason"),
    [
        ("run-through", {}, ("run-through", "--policy slackfit")),
        ("fixed:final", {}, ("fixed:final", "--policy slackfit")),
        ("slackfit", {"forced_exits": False}, ("--forbid-forced-exits",)),
        ("slackfit", {"mode": Mode.OFF}, ("mode off", "--mode")),
    ],
)
def test_the_log_says_why_variants_do_not_serve(
    compiled: Compiled,
    caplog: pytest.LogCaptureFixture,
    policy: str,
    options: dict[str, Any],
    reason: Told,
) -> None:
    async def body(engine: Engine) -> None:
        assert engine.model("m").variants == ()
        result = await engine.infer("m", compiled.unseen)
        assert not result.variants.any()

    with caplog.at_level("INFO", variants.__name__):
        serve(compiled.bundle, body, policy=policy, **options)
    (line,) = [r.getMessage() for r in caplog.records if r.name == variants.__name__]
    tells(line, "full", "4 bits, 2 bits", "not serve")
    tells(line, *reason)


def test_a_fixed_variant_that_is_not_there_is_refused(compiled: Compiled) -> None:
    async def body(_engine: Engine) -> None: ...

    with pytest.raises(OptionsError, match=facts("exit 9@1", "final")):
        serve(compiled.bundle, body, policy="fixed:9@1")


def test_the_cheapest_point_is_the_smallest_variant(compiled: Compiled) -> None:
    async def body(engine: Engine) -> None:
        result = await engine.infer("m", compiled.unseen)
        assert (result.variants == 2).all()

    serve(compiled.bundle, body, policy="cheapest")


def test_nothing_is_prepared_when_batches_change_between_variants(compiled: Compiled) -> None:
    backend = NotingBackend(make_backend("onnxruntime", threads=1, max_rows=8))
    defaults = ModelOptions(scheduling=PolicyName("slackfit"), max_batch_size=8)
    options = EngineOptions(mode=Mode.LEAVE, threads=1, keep_state=False, defaults=defaults)

    async def run() -> None:
        async with await Engine.open(
            {switching.MODEL: compiled.bundle.path}, options, backend=backend
        ) as engine:
            policy = switching.activate(engine, 8, seed=0)
            prepared = backend.prepared
            assert prepared > 0
            backend.runs.clear()
            for row in range(ROWS):
                sample = {name: array[row : row + 1] for name, array in compiled.unseen.items()}
                result = await engine.infer(switching.MODEL, sample)
                assert result.variants[0] == policy.decisions[-1][1]
            assert {variant for _, variant in policy.decisions} == {0, 1, 2}
            assert backend.prepared == prepared
            assert len(backend.runs) >= ROWS

    try:
        asyncio.run(run())
    finally:
        backend.close()


def test_the_simulator_runs_the_variants_that_would_serve(compiled: Compiled) -> None:
    """The smallest to its end: it agrees as often as was recorded."""
    bundle = compiled.quiet
    options = ModelOptions(scheduling=PolicyName.parse(fixed(bundle, 2)), max_batch_size=8)
    model = model_of(bundle, Mode.LEAVE, options)
    assert [len(variant.seconds) for variant in model.smaller] == [2, 2]
    scheduler = scheduler_of(model.points, options, streams=1)
    every = model.behaviour.leaves_at.size
    load = SimulatedLoad(
        arrivals_s=np.arange(every) * 1.0, records=np.arange(every), duration_s=float(every)
    )
    outcomes = simulate(
        model.behaviour, scheduler, model.seconds, load, streams=1, smaller=model.smaller
    )
    assert (outcomes.variant == 2).all()
    assert (outcomes.exit == own(bundle, 2)).all()
    assert outcomes.agrees.mean() == bundle.manifest.variants[1].agreement
    assert outcomes.accuracy == bundle.manifest.variants[1].exits[-1].accuracy
    whole = replace(options, scheduling=PolicyName("run-through"))
    assert model_of(bundle, Mode.LEAVE, whole).smaller == ()


def test_metrics_and_status_page_name_variants(compiled: Compiled) -> None:
    bundle = compiled.quiet

    async def body(engine: Engine) -> None:
        await engine.infer("m", compiled.unseen)
        metrics = render_metrics(engine).decode()
        answered = 'offramp_variant_answered_samples_total{model="m",variant="4 bits"} 60.0'
        assert answered in metrics
        label = f"4 bits: exit {own(bundle, 1)}"
        assert f'exit="{label}"' in metrics
        page = render_status(engine)
        assert "Variants of the model" in page
        assert label in page

    serve(bundle, body, policy=fixed(bundle, 1))


def test_a_variants_files_are_checked_as_all_others(compiled: Compiled, tmp_path: Path) -> None:
    copy = with_policies(compiled.bundle, tmp_path / "c.ee", ExitPolicy(version=1, active=()))
    (copy.path / "variants/1/records.npz").write_bytes(b"altered")
    with pytest.raises(BundleIntegrityError, match=r"variants/1/records\.npz"):
        Bundle.open(copy.path)
