from __future__ import annotations

import numpy as np
import pytest
import torch

from offramp.bundle import Answer, AnswerForm
from offramp.calibration.heads.objectives import ClassObjective


@pytest.mark.parametrize(
    ("form", "never"), [("probabilities", 0.0), ("log-probabilities", -np.inf)]
)
def test_a_class_that_the_model_rules_out_is_ruled_out_at_exits(
    form: AnswerForm, never: float
) -> None:
    rng = np.random.default_rng(0)
    answers = rng.random((50, 3)).astype(np.float32)
    answers[:, 1] = never
    answers[7, 2] = never  # of one sample alone, which rules nothing out
    objective = ClassObjective(Answer(output="y", classes=3, form=form), answers)
    scores = rng.standard_normal((20, 3)).astype(np.float32)
    scores[:, 1] += 5
    found = objective.read(torch.from_numpy(scores.copy()))
    weights = objective.served({"weight": np.eye(3, dtype=np.float32), "bias": np.zeros(3, "f4")})
    served = np.exp(scores @ weights["weight"] + weights["bias"])
    np.testing.assert_array_equal(served[:, 1], 0)
    np.testing.assert_array_equal(found.said, served.argmax(axis=1))
    confidence = served.max(axis=1) / served.sum(axis=1)
    np.testing.assert_allclose(found.principal[:, 0], confidence, rtol=1e-5)
