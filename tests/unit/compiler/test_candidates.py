"""Thinning of cut points, and the user's own list."""

from __future__ import annotations

import dataclasses

import pytest
from tests.facts import facts

from offramp.compiler import ExitRule
from offramp.compiler.common.errors import UnknownCutPointError
from offramp.compiler.cuts.cuts import CutAnalysis, CutPoint, Rejection
from offramp.compiler.cuts.exit_placement import choose_candidates


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


@pytest.mark.parametrize(
    ("rule", "found"),
    [
        ("25%", [1]),  # nearest, before or after
        ("24.9%", [1]),
        ("0%", [0]),
        ("100%", [3]),
        ("25 %", [1]),
        ("20%-60%", [1, 2]),
        ("10%-100%", [0, 1, 2, 3]),
        ("block?", [0, 1, 2, 3]),
        ("*k[13]", [1, 3]),
        ("block2", [2]),
        ("3", [3]),
    ],
)
def test_rules_name_cut_points_in_five_ways(rule: str, found: list[int]):
    assert chosen(0.1, 0.3, 0.5, 0.9, exits=[rule]) == found
    assert chosen(0.1, 0.3, 0.5, 0.9, exits=[ExitRule(rule), rule, "0"]) == sorted({0, *found})


def test_a_tensors_name_wins_over_what_it_looks_like():
    found = analysis(0.1, 0.3, 0.5)
    for name in ("1", "50%", "blo*"):
        cuts = (found.cuts[0], found.cuts[1], dataclasses.replace(found.cuts[2], tensor=name))
        named = dataclasses.replace(found, cuts=cuts)
        assert [cut.index for cut in ExitRule(name).select(named)] == [2]


@pytest.mark.parametrize("rule", ["95%-99%", "60%-20%", "120%", "x*", "4", "10%-", "-1", ""])
def test_rules_that_name_nothing_say_what_there_is(rule: str):
    with pytest.raises(UnknownCutPointError, match=facts(f"{rule!r}", "0 to 2", "10.0% to")):
        chosen(0.1, 0.3, 0.5, exits=[rule])


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
