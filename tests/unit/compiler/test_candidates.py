"""Thinning of cut points, and the user's own list."""

from __future__ import annotations

import pytest

from offramp.compiler.cuts import CutAnalysis, CutPoint, Rejection
from offramp.compiler.errors import UnknownCutPointError
from offramp.compiler.slicing import choose_candidates


def analysis(*shares: float) -> CutAnalysis:
    cuts = tuple(
        CutPoint(
            index=i,
            tensor=f"block{i}",
            dtype="float32",
            shape=("batch", 8),
            operator="Relu",
            flops_share_before=share,
            side_inputs=(),
        )
        for i, share in enumerate(shares)
    )
    rejection = Rejection(tensor="inner", operator="Conv", places=3, reason="inside a block")
    return CutAnalysis(cuts=cuts, rejected=(rejection,), main_inputs=("x",), total_flops=1e6)


def chosen(*shares: float, **options: object) -> list[int]:
    return [cut.index for cut in choose_candidates(analysis(*shares), **options)]


def test_few_cut_points_are_all_kept():
    assert chosen(0.1, 0.5, 0.9) == [0, 1, 2]


def test_thinning_goes_by_cost_not_by_number_and_is_denser_towards_the_start():
    # marks at 0.125, 0.354 and 0.650 of the cost
    assert chosen(0.02, 0.04, 0.06, 0.12, 0.24, 0.35, 0.5, 0.6, 0.76, 0.9, limit=3) == [3, 5, 7]


def test_thinning_keeps_exactly_as_many_even_if_they_crowd():
    assert chosen(0.9, 0.91, 0.92, 0.93, limit=3) == [0, 1, 2]
    assert chosen(0.01, 0.02, 0.03, 0.04, limit=3) == [1, 2, 3]


def test_the_users_list_wins_over_the_limit():
    assert chosen(0.1, 0.2, 0.3, 0.4, exits=["block3", 0, "2"], limit=1) == [0, 2, 3]


def test_unknown_names_get_the_nearest():
    with pytest.raises(UnknownCutPointError, match=r"no cut point 'blok1'; .* 'block1' \(1\)"):
        chosen(0.1, 0.2, exits=["blok1"])
    with pytest.raises(UnknownCutPointError, match="indices run from 0 to 1"):
        chosen(0.1, 0.2, exits=[2])
    with pytest.raises(UnknownCutPointError, match="'inner' was rejected: inside a block"):
        chosen(0.1, 0.2, exits=["inner"])


def test_senseless_arguments():
    with pytest.raises(ValueError, match="limit is 0"):
        chosen(0.1, limit=0)
    with pytest.raises(ValueError, match="exits is empty"):
        chosen(0.1, exits=[])
