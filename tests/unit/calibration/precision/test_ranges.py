"""Ranges of activations: of both signs, with outliers clipped where that pays."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from tests.unit.calibration.precision.graphs_to_quantise import (
    convolved_and_multiplied,
    dataset,
    inputs,
    linear,
)

from offramp.calibration.data import activations
from offramp.calibration.precision.static_scales import Range, activation_ranges


def ranges_of(x: np.ndarray) -> Range:
    proto = onnx.ModelProto.FromString(linear(np.eye(x.shape[1], dtype=np.float32)))
    return activation_ranges(proto, ["x"], dataset({"x": x.astype(np.float32)}), threads=1)["x"]


def test_even_values_keep_their_whole_range() -> None:
    low, high = ranges_of(np.linspace(-1, 3, 4000).reshape(-1, 4))
    assert low == pytest.approx(-1, abs=0.07)
    assert high == pytest.approx(3, abs=0.07)


@pytest.mark.parametrize(("sign", "clipped", "kept"), [(1, 1, 0), (-1, 0, 1)])
def test_an_outlier_is_clipped_on_its_side(sign: int, clipped: int, kept: int) -> None:
    x = np.linspace(-1, 1, 40000).reshape(-1, 4)
    x[0, 0] = 10 * sign
    limits = ranges_of(x)
    assert abs(limits[clipped]) < 9.8
    assert abs(limits[kept]) == pytest.approx(1, abs=0.07)


def test_zero_is_always_inside() -> None:
    low, high = ranges_of(np.linspace(5, 6, 400).reshape(-1, 4))
    assert low == 0
    assert high == pytest.approx(6, abs=0.1)


def test_zeros_have_a_range() -> None:
    assert ranges_of(np.zeros((4, 4))) == (0, 1)


def test_ranges_do_not_depend_on_how_samples_are_batched(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = convolved_and_multiplied()
    proto, given = onnx.ModelProto.FromString(graph), dataset(inputs(graph, 11))
    wanted = activation_ranges(proto, ["image", "second"], given, threads=1)
    monkeypatch.setattr(activations, "BATCH_BYTES", 1)  # one sample at a time
    assert activation_ranges(proto, ["image", "second"], given, threads=1) == wanted
