"""Dynamically quantised models: what batches do to their answers is taken from the promise."""

from __future__ import annotations

import io
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from rich.console import Console
from tests import models
from tests.bundles import compile_tiny

from offramp.bundle import ActiveExit, Bundle, ExitPolicy, Promise, write_bundle
from offramp.bundle.schema.compilation import BatchEffect
from offramp.certify.binomial import half_risk, upper_bound
from offramp.compiler.commands.printing import print_bundle
from offramp.compiler.common.errors import CompileError, VerificationError
from offramp.compiler.common.options import RehearseOptions
from offramp.compiler.exits import policy_choice
from offramp.compiler.samples.batch_effect import COMPARED_BATCH_SIZES
from offramp.compiler.steps.bundle_check import VerifyOptions, verify_bundle
from offramp.compiler.steps.rehearse import rehearse_bundle
from offramp.engine.backends.onnxruntime import make_session
from offramp.engine.models.whole_promise import whole_policy

SAMPLES = 3000


def vectors(*, spread: float) -> dict[str, NDArray[Any]]:
    """Eight kinds of vector; the larger the spread, the more of them lie between two answers."""
    rng = np.random.default_rng(0)
    kinds = np.random.default_rng(99).standard_normal((8, 16)) * 3
    x = kinds[rng.integers(0, 8, SAMPLES)] + rng.standard_normal((SAMPLES, 16)) * spread
    return {"x": x.astype(np.float32)}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, list[str]]:
    folder, said = tmp_path_factory.mktemp("dynamic"), []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("offramp.compiler.samples.batch_effect").addHandler(handler)
    model = models.dynamically_quantised()
    with pytest.MonkeyPatch.context() as patched:
        certify = policy_choice.certified_policy

        def certified(*args: Any, **asked: Any) -> ExitPolicy:
            said.append(f"certify {asked['max_disagreement']} {asked['confidence_level']}")
            return certify(*args, **asked)

        patched.setattr(policy_choice, "certified_policy", certified)
        bundle = compile_tiny(model, vectors(spread=0.3), folder, max_disagreement=0.05)
    return Bundle.open(bundle.path), said


def test_the_share_is_counted_and_taken_from_the_promise(compiled: tuple[Bundle, list[str]]):
    bundle, said = compiled
    effect = bundle.manifest.batch_effect
    assert effect is not None
    assert effect.operators == ("round0", "round1", "round2")
    assert effect.batch_sizes == (1, 7, 64)
    assert effect.samples == SAMPLES - bundle.manifest.calibration.certify_samples
    spent = upper_bound(effect.end_differs, effect.samples, 0.975)
    assert spent <= effect.spent(0.95) < spent + 1e-4
    assert said[1:] == [f"certify {0.05 - effect.spent(0.95)} {1 - (1 - 0.95) / 2}"]
    told = f"answers {effect.end_differs:,} of {effect.samples:,} samples differently"
    assert told in said[0]
    assert "3 operators round by the range of the whole batch" in said[0]
    assert "which is taken from the promise (5.00% at 95%)" in said[0]
    assert told in bundle.read("report.html").decode()


def test_verify_judges_the_whole_promise_and_lets_the_end_vary(
    compiled: tuple[Bundle, list[str]], tmp_path: Path
):
    """Remaining rows of a batch are rounded differently than in the whole one."""
    made, data = compiled[0], tmp_path / "more.npz"
    np.savez(data, **vectors(spread=0.3))
    effect = made.manifest.batch_effect
    assert effect is not None
    exits = Promise(
        max_disagreement=effect.left(),
        confidence_level=half_risk(0.95),
        certify_samples=1000,
        certify_errors=3,
        p_value=0.01,
        predicted_savings=0.5,
    )
    late = (ActiveExit(exit=0, threshold=0.99),)
    files = {entry.path: made.read(entry.path) for entry in made.manifest.files}
    promised = replace(made.policy, active=late, promise=exits)
    bundle = write_bundle(tmp_path / "promised.ee", made.manifest, promised, files)
    found = verify_bundle(VerifyOptions(bundle=bundle.path, data=data))
    whole = whole_policy(bundle.policy, effect).promise
    assert whole is not None
    assert (whole.max_disagreement, whole.confidence_level) == pytest.approx((0.05, 0.95))
    assert found.at_most == upper_bound(found.disagreements, SAMPLES, whole.confidence_level)
    assert found.verdict == "kept"
    out = io.StringIO()
    print_bundle(bundle, Console(file=out, width=300))
    assert "unmodified model ≤ 5% on unseen data like the calibration set, with 95% confi" in (
        out.getvalue()
    )


def test_what_was_counted_on_other_data_is_not_rehearsed(
    compiled: tuple[Bundle, list[str]], tmp_path: Path
):
    bundle, _ = compiled
    options = RehearseOptions(bundle=bundle.path, data=tmp_path / "x.npz")
    with pytest.raises(CompileError, match=r"quantised model, .* compile the model again"):
        rehearse_bundle(options)


def test_the_count_is_that_of_answers_in_batches_of_three_sizes(
    compiled: tuple[Bundle, list[str]], tmp_path: Path
):
    bundle, _ = compiled
    session = make_session(bundle.read("source.onnx"), 1)
    x = vectors(spread=0.3)["x"]
    answers = []
    for size in COMPARED_BATCH_SIZES:
        parts = [session.run(None, {"x": x[i : i + size]})[0] for i in range(0, len(x), size)]
        answers.append(np.concatenate(parts).argmax(axis=1))
    share = float(np.mean(np.ptp(answers, axis=0) > 0))
    effect = bundle.manifest.batch_effect
    assert effect is not None
    # other samples lie in one batch here: shares of the same population
    spread = 3 * np.sqrt(max(share, 1e-3) / SAMPLES)
    assert abs(effect.end_differs / effect.samples - share) <= spread


def test_a_promise_that_is_spent_without_exits_is_refused(tmp_path: Path):
    with pytest.raises(VerificationError) as caught:
        compile_tiny(
            models.dynamically_quantised(), vectors(spread=3), tmp_path, max_disagreement=0.02
        )
    message = str(caught.value)
    assert "spends the whole promise, without any exit" in message
    assert "The first of the operators is 'round0' (DynamicQuantizeLinear)" in message
    assert "Compile the float32 model instead" in message
    assert "(2.00% at 95%)" in message


def test_other_models_have_no_such_share(tmp_path: Path):
    bundle = compile_tiny(models.mlp(), vectors(spread=0.3), tmp_path, epochs=1)
    assert bundle.manifest.batch_effect is None
    assert b"batch_effect" not in (bundle.path / "manifest.json").read_bytes()


def test_what_is_left_is_told_in_hundredths_of_a_percent():
    effect = BatchEffect(
        operators=("a", "b"),
        batch_sizes=(1, 7, 64),
        samples=1000,
        end_differs=3,
        max_disagreement=0.01,
        confidence_level=0.95,
    )
    assert effect.spent(0.95) == 0.0088
    assert effect.left() == pytest.approx(0.0012)
