"""Coordinates are an affine map of the features, which a layer can take back."""

from __future__ import annotations

import numpy as np
import pytest

from offramp.calibration.heads.preconditioning import (
    COMPONENTS,
    LARGEST,
    LEAST_DEVIATION,
    Preconditioner,
)


def correlated(samples: int, features: int, *, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    shared = rng.standard_normal((samples, 3)) @ rng.standard_normal((3, features))
    return (5 + shared + 0.3 * rng.standard_normal((samples, features))).astype(np.float32)


def test_coordinates_are_uncorrelated_and_half_whitened() -> None:
    features = correlated(2000, 12)
    coordinates = Preconditioner.fit(features).apply(features)
    standard = (features - features.mean(0)) / features.std(0)
    variances = np.linalg.eigvalsh(np.cov(standard.T, bias=True))
    covariance = np.cov(coordinates.T, bias=True)
    # a component of deviation s is scaled by s^-1/2, so that its variance is s
    np.testing.assert_allclose(np.diag(covariance), np.sqrt(variances), rtol=1e-3)
    assert np.abs(covariance - np.diag(np.diag(covariance))).max() < 1e-3


@pytest.mark.parametrize("features", [12, COMPONENTS + 40, LARGEST + 1])
def test_a_layer_on_coordinates_folds_to_one_on_features(features: int) -> None:
    values = correlated(600, features)
    made = Preconditioner.fit(values)
    assert made.width <= (features if features > LARGEST else COMPONENTS)
    rng = np.random.default_rng(1)
    weight = rng.standard_normal((made.width, 4)).astype(np.float32)
    bias = rng.standard_normal(4).astype(np.float32)
    plain, plain_bias = made.fold(weight, bias)
    wanted = made.apply(values) @ weight + bias
    np.testing.assert_allclose(values @ plain + plain_bias, wanted, rtol=1e-3, atol=1e-2)


def test_what_hardly_varies_has_no_coordinate() -> None:
    values = correlated(500, 6)
    values[:, 2] = 1000.0
    values[:, 5] = values[:, 4] * 2  # the same once standardised
    made = Preconditioner.fit(values)
    assert made.width == 4
    assert np.abs(made.matrix[2]).max() < 1e-12


def test_features_that_never_vary_at_all_keep_a_coordinate() -> None:
    made = Preconditioner.fit(np.ones((10, 3), np.float32))
    assert made.width >= 1
    assert np.isfinite(made.apply(np.ones((2, 3), np.float32))).all()
    assert np.isfinite(made.matrix).all()
    assert np.abs(made.matrix).max() <= 1 / np.sqrt(LEAST_DEVIATION) / 1e-3 + 1


def test_samples_that_are_no_numbers_are_passed_over() -> None:
    values = correlated(300, 5)
    clean = Preconditioner.fit(values[100:])
    values[:100, 3] = np.nan
    made = Preconditioner.fit(values)
    np.testing.assert_array_equal(made.mean, clean.mean)
    np.testing.assert_array_equal(made.matrix, clean.matrix)


def test_features_without_any_number_are_left_as_they_are() -> None:
    made = Preconditioner.fit(np.full((10, 3), np.inf, np.float32))
    np.testing.assert_array_equal(made.apply(np.eye(3, dtype=np.float32)), np.eye(3))
