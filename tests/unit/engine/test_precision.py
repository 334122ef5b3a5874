"""Bundles of precision int8 are for CPUs: a GPU refuses them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.cuda_fakes import fake_cuda
from tests.unit.bundle.cascades import write_cascade
from tests.unit.bundle.examples import write

from offramp.engine.control.costs import CostModel
from offramp.engine.controllers import ramp_budget
from offramp.engine.errors import BackendError
from offramp.engine.options import ModelOptions
from offramp.engine.plan import Mode, make_plan
from offramp.engine.precision import require_fp32


def test_a_gpu_refuses_its_stages(tmp_path: Path) -> None:
    backend, _, _ = fake_cuda()
    for stage in make_plan(write_cascade(tmp_path)).stages:
        with pytest.raises(BackendError) as caught:
            backend.prepare(stage)
        assert str(caught.value) == (
            f"{tmp_path / 'small.ee'} is of precision int8, which is for CPUs; serve it with "
            "--backend onnxruntime, or compile it with --precision fp32"
        )
    backend.close()


def test_bundles_of_fp32_are_refused_nowhere(tmp_path: Path) -> None:
    bundle = write(tmp_path)
    require_fp32(bundle.manifest, bundle.path)


def test_the_quantised_model_is_within_a_ramp_budget_that_nobody_asked_for(tmp_path: Path) -> None:
    bundle = write_cascade(tmp_path)
    costs = CostModel.of(bundle.manifest, bundle.profile(), 8)  # 5 of 20 ms, and exits of 1 ms
    none = replace(bundle.policy, active=())
    plain = ModelOptions()
    assert ramp_budget(none, costs, Mode.AUDIT, plain) == pytest.approx(0.1 + 0.25)
    assert ramp_budget(bundle.policy, costs, Mode.AUDIT, plain) == pytest.approx(0.1 + 0.25)
    assert ramp_budget(none, costs, Mode.RELEASE, plain) == pytest.approx(0.02 + 0.25)
    asked = ModelOptions(ramp_budget=0.05)
    assert ramp_budget(none, costs, Mode.AUDIT, asked) == 0.05
