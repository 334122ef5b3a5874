"""Answers that depend on batch mates are found, and no kind that is offered has any."""

from __future__ import annotations

import numpy as np
import pytest
from tests.facts import facts
from tests.models import Builder, residual_cnn
from tests.unit.calibration.precision.graphs_to_quantise import (
    OF_TRANSFORMERS,
    RUN_HERE,
    convolved_and_multiplied,
    inputs,
    linear,
    made,
    scaled_by_the_batch,
    serialised,
    transformer,
)

from offramp.calibration.precision.kinds import CpuPrecision
from offramp.calibration.precision.quantised_graphs import TOLERANCE, depends_on_batch_mates

ROWS = 8


def uneven(width: int) -> dict[str, np.ndarray]:
    """Rows of very different magnitudes, so that one scale suits none but the largest."""
    rng = np.random.default_rng(0)
    magnitudes = np.logspace(-2, 2, ROWS, dtype=np.float32)[:, None]
    return {"x": rng.standard_normal((ROWS, width)).astype(np.float32) * magnitudes}


@pytest.mark.parametrize("kind", RUN_HERE)
def test_no_kind_depends_on_batch_mates(kind: CpuPrecision) -> None:
    graph = made(convolved_and_multiplied(), kind)
    found = depends_on_batch_mates(graph, inputs(graph, ROWS, seed=3), answer="y")
    assert not found.depends, found
    assert (found.rows, found.changed) == (ROWS, 0)


@pytest.mark.parametrize("kind", OF_TRANSFORMERS)
def test_no_transformer_depends_on_batch_mates(kind: CpuPrecision) -> None:
    graph = made(serialised(transformer().model.proto), kind)
    found = depends_on_batch_mates(graph, inputs(graph, ROWS, seed=3), answer="logits")
    assert not found.depends, found


def test_integers_of_a_convolution_are_the_same_bit_for_bit() -> None:
    graph = made(serialised(residual_cnn()), CpuPrecision.STATIC)
    given = inputs(graph, ROWS, seed=3)
    assert depends_on_batch_mates(graph, given, answer="probabilities").difference == 0


def test_rows_of_all_magnitudes_are_independent() -> None:
    weight = np.random.default_rng(1).standard_normal((64, 64)).astype(np.float32)
    graph = made(linear(weight), CpuPrecision.ROWS)
    assert depends_on_batch_mates(graph, uneven(64), answer="y").difference < 1e-6


def test_one_scale_for_all_rows_of_a_batch_is_found() -> None:
    graph = scaled_by_the_batch()
    found = depends_on_batch_mates(graph, uneven(64), answer="y")
    assert found.depends
    assert found.difference > TOLERANCE
    assert found.changed > 0


def test_rows_that_read_each_other_in_order_are_found() -> None:
    b = Builder()
    x = b.input("x", ["batch", 4])
    b.node("CumSum", x, b.constant(0, np.int64), out="y")
    b.output("y", ["batch", 4])
    assert depends_on_batch_mates(serialised(b.build()), uneven(4), answer="y").depends


def test_answers_that_are_no_numbers_are_dependent() -> None:
    b = Builder()
    b.node("Log", b.input("x", ["batch", 4]), out="y")
    b.output("y", ["batch", 4])
    given = {"x": -np.ones((3, 4), np.float32)}
    assert depends_on_batch_mates(serialised(b.build()), given, answer="y").depends


def test_a_single_sample_has_no_mates() -> None:
    graph = linear(np.ones((64, 64), np.float32))
    with pytest.raises(ValueError, match=facts("1 samples", "batch", "at least 2")):
        depends_on_batch_mates(graph, inputs(graph, 1), answer="y")
