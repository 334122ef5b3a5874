"""Heads that fit cut tensors, and pooling windows that cover the whole map."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.facts import Told, tells

from offramp.bundle import Head
from offramp.calibration.heads.cut_tensors import CutTensor, why_no_head
from offramp.calibration.heads.families import HIDDEN, family_of, grids_of, masks_of, pooling_window
from offramp.calibration.heads.features import LAST
from offramp.compiler.exits.heads import build_last, build_pooling


def cut(*shape: int | str, **options: Any) -> CutTensor:
    return CutTensor(name="cut", dtype="float32", shape=("batch", *shape), **options)


@pytest.mark.parametrize(
    ("shape", "grids"),
    [
        ((16, 1, 1), (1,)),
        ((16, 2, 2), (1, 2)),
        ((16, 3, 9), (1, 2)),
        ((16, 7, 7), (1, 7)),
        ((16, 14, 14), (1, 7)),
        ((16, 8, 8), (1, 8)),
        ((16, 32, 32), (1, 8)),
        ((512, 28, 28), (1, 2)),  # 512 · 4² is beyond what is tried
        ((9000, 4, 4), (1,)),
        ((16, "height", "width"), (1,)),
    ],
)
def test_grids(shape: tuple[int | str, ...], grids: tuple[int, ...]) -> None:
    assert grids_of(cut(*shape)) == grids


def test_maps_get_apparate_s_head_and_the_finest_grid_with_and_without_a_hidden_layer() -> None:
    assert family_of(cut(16, 14, 14)) == (
        Head(kind="grid", grid=1),
        Head(kind="grid", grid=7),
        Head(kind="grid", grid=7, hidden=HIDDEN),
    )


def test_signals_and_videos_are_maps_with_another_number_of_sides() -> None:
    assert family_of(cut(16, 64, channels=1))[-1] == Head(
        kind="grid", grid=8, axes=1, hidden=HIDDEN
    )
    assert family_of(cut(16, 4, 8, 8))[-1] == Head(kind="grid", grid=4, axes=3, hidden=HIDDEN)
    assert [head.describe() for head in family_of(cut(16, 64, channels=1))[:2]] == [
        "grid of 1, linear",
        "grid of 8, linear",
    ]
    assert family_of(cut(16, 4, 8, 8))[1].describe() == "4×4×4 grid, linear"


def test_channels_may_come_last() -> None:
    last = cut(14, 28, 16, channels=3)

    assert (last.width, last.sides, grids_of(last)) == (16, (14, 28), (1, 7))


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (cut("sequence", "width"), ("dimension 2", "channels", "no fixed size")),
        (cut(4, 4, "channels", channels=3), ("dimension 3", "channels")),
        (cut(2, 3, 4, 5, 6), ("6 dimensions", "2 to 5")),
        (cut(4, 16, 4, channels=2), ("channels", "dimension 2 of 4")),
    ],
)
def test_what_is_wrong_with_a_tensor_is_said(tensor: CutTensor, reason: Told) -> None:
    assert family_of(tensor) == ()
    tells(why_no_head(tensor), *reason)


def test_a_map_of_one_pixel_has_one_grid() -> None:
    assert family_of(cut(16, 1, 1)) == (
        Head(kind="grid", grid=1),
        Head(kind="grid", grid=1, hidden=HIDDEN),
    )


def test_tokens_get_pooled_and_attended() -> None:
    assert family_of(cut("sequence", 32)) == (
        Head(kind="first"),
        Head(kind="mean"),
        Head(kind="attention", queries=1),
        Head(kind="attention", queries=4),
        Head(kind="attention", queries=1, hidden=HIDDEN),
        Head(kind="attention", queries=4, hidden=HIDDEN),
    )


def test_models_that_answer_by_their_last_token_are_asked_there_and_not_at_the_first() -> None:
    assert family_of(cut("sequence", 32, answers_last=True)) == (
        Head(kind="last"),
        Head(kind="last", hidden=HIDDEN),
        Head(kind="mean"),
        Head(kind="attention", queries=1),
        Head(kind="attention", queries=4),
        Head(kind="attention", queries=1, hidden=HIDDEN),
        Head(kind="attention", queries=4, hidden=HIDDEN),
    )
    assert Head(kind="last").describe() == "last token, linear"
    assert family_of(cut(32, answers_last=True)) == family_of(cut(32))


@pytest.mark.parametrize("opset", [13, 17, 18, 21])
def test_the_last_token_is_the_last_that_the_mask_counts(opset: int) -> None:
    tokens = np.arange(5 * 4 * 3, dtype=np.float32).reshape(5, 4, 3)
    mask = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0]])
    masked = cut("sequence", 3, mask="mask", answers_last=True)
    versions = {"opset": opset, "ir_version": 8}
    for tensor, places in ((masked, [3, 1, 3, 2, 0]), (replace(masked, mask=None), [3] * 5)):
        model, names = build_last(tensor, "pool/", **versions)
        session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
        given = {"cut": tokens, "mask": mask} if tensor.mask else {"cut": tokens}
        (found,) = session.run([names[LAST]], given)
        np.testing.assert_array_equal(found, tokens[np.arange(5), places])


def test_vectors() -> None:
    assert family_of(cut(32)) == (Head(kind="vector"), Head(kind="vector", hidden=HIDDEN))


@pytest.mark.parametrize(
    "shape", [("width",), ("sequence", "width"), ("channels", 4, 4), (2, 3, 4, 5, 6), ()]
)
def test_no_head_fits_unknown_widths_and_other_ranks(shape: tuple[int | str, ...]) -> None:
    assert family_of(cut(*shape)) == ()


def test_only_heads_that_pool_tokens_read_the_mask() -> None:
    tokens = cut("sequence", 32, mask="attention_mask")
    readers = {head.kind for head in family_of(tokens) if masks_of(tokens, head)}
    assert readers == {"mean", "attention"}
    assert not any(masks_of(cut("sequence", 32), head) for head in family_of(tokens))


@given(st.integers(1, 200).flatmap(lambda s: st.tuples(st.just(s), st.integers(1, s))))
def test_windows_cover_all_and_are_as_many_as_the_grid(size_and_grid: tuple[int, int]) -> None:
    size, grid = size_and_grid
    kernel, stride = pooling_window(size, grid)
    starts = list(range(0, size - kernel + 1, stride))
    assert len(starts) == grid
    assert {i for start in starts for i in range(start, start + kernel)} == set(range(size))
    if size % grid == 0:
        assert kernel == stride == size // grid  # they tile


@given(st.integers(1, 12), st.integers(1, 12), st.sampled_from([1, 2, 4, 7, 8]), st.integers(0, 99))
@settings(deadline=None, max_examples=40)
def test_pooling_graphs_average_those_windows(h: int, w: int, grid: int, seed: int) -> None:
    grid = min(grid, h, w)
    model, names = build_pooling(cut(3, h, w), "pool/", (grid,), opset=17, ir_version=8)
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    maps = np.random.default_rng(seed).standard_normal((2, 3, h, w)).astype(np.float32)
    (pooled,) = session.run([names[grid]], {"cut": maps})
    # float32 sums of at most 144 numbers of about 1, in another order
    np.testing.assert_allclose(pooled, pool_by_hand(maps, grid), rtol=0, atol=1e-5)


def pool_by_hand(maps: np.ndarray, grid: int) -> np.ndarray:
    windows = []
    for size in maps.shape[2:]:
        kernel, stride = pooling_window(size, grid)
        windows.append([slice(i * stride, i * stride + kernel) for i in range(grid)])
    pooled = [[maps[:, :, r, c].mean(axis=(2, 3)) for c in windows[1]] for r in windows[0]]
    return np.moveaxis(np.array(pooled), (0, 1), (2, 3)).reshape(len(maps), -1)
