"""Equal samples count once in the evidence, and one source has a bounded share of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from offramp.engine.control.evidence_window import EvidenceWindow, fingerprints

SAMPLES = st.lists(st.tuples(st.integers(0, 20), st.sampled_from("abc")), max_size=200)
"""Fingerprints, many of them equal, with their sources."""


def admitted(window: EvidenceWindow, samples: Sequence[tuple[int, str]]) -> list[bool]:
    """Ask about samples in chunks of three."""
    found: list[bool] = []
    for first in range(0, len(samples), 3):
        part = samples[first : first + 3]
        found += window.admit(np.arange(first, first + len(part)), part).tolist()
    return found


@given(SAMPLES, st.integers(1, 8))
def test_a_sample_is_admitted_unless_an_equal_one_is_remembered(
    samples: list[tuple[int, str]], remembered: int
) -> None:
    found = admitted(EvidenceWindow(remembered=remembered), samples)
    kept: list[int] = []
    for (fingerprint, _), is_evidence in zip(samples, found, strict=True):
        assert is_evidence == (fingerprint not in kept[-remembered:])
        if is_evidence:
            kept.append(fingerprint)


@given(SAMPLES, st.floats(0.1, 1.0), st.integers(1, 30))
def test_one_source_has_at_most_its_share(
    samples: list[tuple[int, str]], share: float, shared: int
) -> None:
    window = EvidenceWindow(max_source_share=share, shared=shared)
    found = admitted(window, samples)
    sources = [s for (_, s), is_evidence in zip(samples, found, strict=True) if is_evidence]
    for first in range(len(sources)):
        part = sources[first : first + shared]
        assert all(part.count(source) <= max(1, share * shared) for source in part)


@given(SAMPLES)
def test_how_samples_come_together_changes_nothing(samples: list[tuple[int, str]]) -> None:
    one, other = (EvidenceWindow(remembered=8, max_source_share=0.5, shared=10) for _ in range(2))
    at_once = one.admit(np.arange(len(samples)), samples).tolist()
    assert at_once == admitted(other, samples)


def test_a_sample_that_is_tried_again_stays_what_it_was() -> None:
    window, numbers = EvidenceWindow(), np.array([5, 6])
    both = [(1, "a"), (1, "b")]
    assert window.admit(numbers, both).tolist() == [True, False]
    assert window.admit(numbers, both).tolist() == [True, False]


@given(st.data())
def test_equal_samples_and_no_others_have_equal_fingerprints(data: st.DataObject) -> None:
    """Fingerprints do not depend on the rest of the batch, nor on memory layouts."""
    kinds = st.sampled_from([np.uint8, np.float32, np.int64])
    shape = data.draw(st.lists(st.integers(0, 3), max_size=3))
    dtypes = data.draw(st.lists(kinds, min_size=1, max_size=3))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    arrays: list[NDArray[np.generic]] = [
        rng.integers(0, 3, (12, *shape)).astype(dtype) for dtype in dtypes
    ]
    chosen = rng.integers(0, 12, 30)
    prints = fingerprints([array[chosen] for array in arrays], 30)
    alone = [fingerprints([array[row : row + 1] for array in arrays], 1)[0] for row in chosen]
    backwards = fingerprints([array[chosen][::-1] for array in arrays], 30)
    assert prints == alone == backwards[::-1]
    contents = [b"".join(array[row].tobytes() for array in arrays) for row in chosen]
    assert len(set(prints)) == len(set(contents))


@pytest.mark.parametrize("size", [65_536, 65_537, 150_528])
def test_long_samples_that_differ_throughout_have_different_fingerprints(size: int) -> None:
    images = np.random.default_rng(0).integers(0, 256, (8, size), np.uint8)
    twice = np.concatenate([images, images])
    prints = fingerprints([twice], 16)
    assert prints[:8] == prints[8:]
    assert len(set(prints)) == 8


@pytest.mark.parametrize(
    "wrong", [{"remembered": 0}, {"shared": 0}, {"max_source_share": 0.0}, {"max_source_share": 2}]
)
def test_settings_must_make_sense(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        EvidenceWindow(**wrong)
