"""Ranges of sizes from the command line."""

from __future__ import annotations

import pytest
from tests.facts import Told, tells

from offramp.compiler.common.errors import EngineOptionsError
from offramp.compiler.engines.build_options import (
    DEFAULT_BATCHES,
    SizeRange,
    describe_ranges,
    parse_batches,
    parse_buckets,
)


@pytest.mark.parametrize(
    ("text", "ranges"),
    [
        (DEFAULT_BATCHES, [(1, 1), (2, 8), (9, 32)]),
        ("4", [(4, 4)]),
        (" 1 , 2 - 8 ", [(1, 1), (2, 8)]),
        ("2-2,16,20-40", [(2, 2), (16, 16), (20, 40)]),
    ],
)
def test_batches(text: str, ranges: list[tuple[int, int]]) -> None:
    assert list(parse_batches(text)) == ranges


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ("size is missing",)),
        ("1,,2", ("a size is missing",)),
        ("0", ("'0'", "1 or more")),
        ("-3", ("''", "size")),
        ("1.5", ("'1.5'", "size")),
        ("two", ("'two'", "size")),
        ("1-2-3", ("'2-3'", "size")),
        ("8-2", ("8-2", "2-8")),
        ("1-8,8-32", ("8-32", "after 1-8")),
        ("2-8,1", ("1", "after 2-8")),
        ("4,4", ("4", "after 4")),
    ],
)
def test_batches_that_are_refused(text: str, said: Told) -> None:
    with pytest.raises(EngineOptionsError) as refused:
        parse_batches(text)
    tells(str(refused.value), *said)
    assert f"--batch-profiles {text!r}" in str(refused.value)


@pytest.mark.parametrize(
    ("options", "buckets"),
    [
        ([], {}),
        (["sequence=32,64,128"], {"sequence": [(1, 32), (33, 64), (65, 128)]}),
        (["s=16", "t=8-8,12"], {"s": [(1, 16)], "t": [(8, 8), (9, 12)]}),
        (["height=200-224,225-256"], {"height": [(200, 224), (225, 256)]}),
    ],
)
def test_buckets(options: list[str], buckets: dict[str, list[tuple[int, int]]]) -> None:
    found = parse_buckets(options)
    assert {name: list(ranges) for name, ranges in found.items()} == buckets


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["32,64"], ("NAME=SIZES", "sequence=32,64,128")),
        (["=32"], ("NAME=SIZES",)),
        (["s="], ("a size is missing",)),
        (["s=64,32"], ("32", "after 1-64")),
        (["s=32,32"], ("32", "after 1-32")),
        (["s=x"], ("'x'", "size")),
        (["s=1", "s=2"], ("s", "twice")),
    ],
)
def test_buckets_that_are_refused(options: list[str], said: Told) -> None:
    with pytest.raises(EngineOptionsError) as refused:
        parse_buckets(options)
    tells(str(refused.value), *said)
    assert "--buckets" in str(refused.value)


def test_ranges_in_words() -> None:
    assert describe_ranges([SizeRange(1, 1), SizeRange(2, 8)]) == "1, 2-8"
