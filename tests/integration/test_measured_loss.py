"""Exits that were measured to cost more than they save are built, and left out of use."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from rich.console import Console
from tests.bundles import equal_times
from tests.models import mlp
from tests.small import _vectors

from offramp.bundle import Bundle
from offramp.bundle.schema.measured import Measured, MeasuredSize, Ratio
from offramp.calibration.choose import limits
from offramp.calibration.data.training_options import TrainingOptions
from offramp.compiler.commands.printing import print_bundle
from offramp.compiler.common.options import CompileOptions
from offramp.compiler.steps import compile as compiling
from offramp.engine.stages.plan import Plan

MEASURED_LOSS = limits.measured_loss
ONE = Ratio(value=1.0, half_width=0.1)
LOSS = MeasuredSize(
    batch_size=16, rounds=12, samples=600, mean=ONE, median=ONE, nothing_exits=ONE,
    busy=Ratio(value=1.4, half_width=0.1),
)  # fmt: skip


def test_the_bundle_serves_the_unmodified_model_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnx.save(mlp(layers=4, classes=3), tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", x=_vectors(1400, 0))
    asked = []

    def measured(_source: Any, plan: Plan, *_samples: Any, **_how: Any) -> Measured:
        asked.append(plan.exits)
        return Measured(device="cpu", threads=1, samples=600, agreement=1.0, sizes=(LOSS,))

    with equal_times():
        monkeypatch.setattr(limits, "measured_loss", MEASURED_LOSS)
        monkeypatch.setattr(compiling, "measure_policy", measured)
        options = CompileOptions.of(
            model=tmp_path / "model.onnx",
            data=tmp_path / "data.npz",
            output=tmp_path / "lost.ee",
            max_disagreement=0.05,
            max_overhead=0.99,
            training=TrainingOptions(epochs=1, batch_size=64),
        )
        compiling.compile_model(options)
    (exits,) = asked
    assert exits, "exits were chosen, certified, and measured"
    bundle = Bundle.open(tmp_path / "lost.ee")
    assert bundle.manifest.exits
    assert (bundle.policy.active, bundle.policy.promise) == ((), None)
    reason = "with exits the model took 1.40 ± 0.10 of its own time at batch 16, measured here"
    assert bundle.manifest.idle_reason.startswith(reason)
    said = io.StringIO()
    print_bundle(bundle, Console(file=said))
    assert f"\n  Reason: {reason}" in said.getvalue()
