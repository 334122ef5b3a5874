"""Models that one protobuf message cannot hold: the limit is set small, so the models are, too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from tests import models
from tests.bundles import equal_times
from tests.exports import run_bundle
from tests.facts import facts
from tests.integration.test_compile_tiny import vectors

from offramp.bundle import Bundle, BundleSchemaError
from offramp.calibration.data.training_options import TrainingOptions
from offramp.compiler.common.options import CompileOptions
from offramp.compiler.plain.wrap import WrapOptions, wrap_model
from offramp.compiler.steps.bundle_check import VerifyOptions, verify_bundle
from offramp.compiler.steps.compile import compile_model
from offramp.compiler.steps.profile import measure
from offramp.engine.backends.custom_ops import load_session, session_options
from offramp.engine.backends.onnxruntime import OnnxRuntimeBackend
from offramp.engine.models.profile_check import profile_here
from offramp.engine.self_check.subject import ChainedReference

LIMIT = 120_000
WIDE = {"x": np.tile(vectors(60, seed=5)["x"], 4)}


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit messages to less than the model, and sessions of it to one."""
    for module in (
        "bundle.stored_graphs",
        "compiler.frontend.source_file",
        "compiler.export.export",
        "compiler.steps.settling",
    ):
        monkeypatch.setattr(f"offramp.{module}.MOST_BYTES", LIMIT)
    monkeypatch.setattr("offramp.engine.stages.loaded.TOGETHER_BYTES", LIMIT)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a chain with weights in a file next to it, named like our own."""
    path = tmp_path / "model.onnx"
    proto = models.mlp(width=64, layers=12)
    onnx.save(proto, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    assert (tmp_path / "weights.bin").stat().st_size > 1.5 * LIMIT
    return path


def answers(model: Path) -> np.ndarray:
    (answer,) = load_session(str(model), session_options()).run(None, WIDE)
    return np.asarray(answer)


@pytest.fixture
def bundle(model: Path) -> Bundle:
    folder = model.parent
    np.savez(folder / "data.npz", x=np.tile(vectors()["x"], 4))
    options = CompileOptions.of(
        model=model,
        data=folder / "data.npz",
        output=folder / "large.ee",
        max_disagreement=0.05,
        max_overhead=0.99,
        training=TrainingOptions(epochs=2, batch_size=64),
        candidates=2,
    )
    with equal_times():
        return compile_model(options)


def test_it_is_compiled_verified_and_served(bundle: Bundle, model: Path) -> None:
    assert bundle.policy.active
    source = bundle.manifest.source.file
    with pytest.raises(BundleSchemaError, match=facts("runtimes", "map the weights file")):
        bundle.read(source)
    check = verify_bundle(VerifyOptions(bundle=bundle.path, data=model.parent / "data.npz"))
    assert (check.samples, check.verdict) == (1400, "kept")
    wanted, found = answers(model), run_bundle(bundle, WIDE)
    at_end = found.exit == -1
    np.testing.assert_allclose(found.answer[at_end], wanted[at_end], rtol=0, atol=1e-4)
    assert (found.answer.argmax(1) == wanted.argmax(1)).mean() > 0.9
    plain = run_bundle(replace(bundle, policy=replace(bundle.policy, active=())), WIDE)
    np.testing.assert_allclose(plain.answer, wanted, rtol=0, atol=1e-4)
    chained = ChainedReference(bundle, ()).run(WIDE, [bundle.manifest.answer.output])
    np.testing.assert_allclose(*chained.values(), wanted, rtol=0, atol=1e-4)


def test_it_is_profiled_again_one_session_at_a_time(bundle: Bundle) -> None:
    with equal_times():
        profile = measure(bundle, 1, (1, 2))
    assert profile.batch_sizes == (1, 2)
    assert len(profile.segments_ms) == len(bundle.manifest.segments)
    here = profile_here(
        bundle, OnnxRuntimeBackend(), bundle.profile(), max_batch_size=2, keep=False
    )
    assert min(here.source_ms) > 0


def test_it_is_served_as_it_is(model: Path) -> None:
    bundle = wrap_model(WrapOptions(model=model, output=model.with_name("plain.ee")))
    wanted = answers(model)
    for file in model.parent.glob("*.*"):
        if file.is_file():
            file.unlink()
    np.testing.assert_allclose(run_bundle(bundle, WIDE).answer, wanted, rtol=0, atol=1e-6)
