"""Files that say what is elastic: read strictly, and errors of one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.facts import Told, facts, tells

from offramp.supernet.graphs import ElasticSpec, SubnetChoice, read_spec
from offramp.supernet.graphs.elastic_spec import DepthGroup, Skip, WidthGroup
from offramp.supernet.graphs.errors import ElasticSpecError

WHOLE = """
[[depth]]
skip = ["/blocks/blocks.2", "/blocks/blocks.1/"]
[[depth]]
skip = [{ from = "a", to = "b" }]
[[width]]
weights = ["/blocks/blocks.0/conv1/Conv"]
axis = 0
ratios = [0.75, 0.25, 0.5]
[[width]]
weights = ["qkv"]
parts = 3
ratios = [0.5]
[norm]
layers = ["/blocks"]
[points]
keep = 4
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "elastic.toml"
    path.write_text(text)
    return path


def test_a_file_is_read_as_it_is_written(tmp_path: Path) -> None:
    path = written(tmp_path, WHOLE)
    assert read_spec(path) == ElasticSpec(
        depths=(
            DepthGroup(skip=(Skip(scope="/blocks/blocks.2"), Skip(scope="/blocks/blocks.1"))),
            DepthGroup(skip=(Skip(start="a", end="b"),)),
        ),
        widths=(
            WidthGroup(weights=("/blocks/blocks.0/conv1/Conv",), axis=0, ratios=(0.25, 0.5, 0.75)),
            WidthGroup(weights=("qkv",), parts=3, ratios=(0.5,)),
        ),
        norm_layers=("/blocks",),
        keep=4,
        source=str(path),
    )


def test_what_is_not_said_is_automatic(tmp_path: Path) -> None:
    spec = read_spec(written(tmp_path, '[[depth]]\nskip = ["/a"]'))
    assert (spec.norm_layers, spec.keep, spec.widths) == ("auto", 6, ())


DEPTH = '[[depth]]\nskip = ["/a"]\n'
WIDTH = '[[width]]\nweights = ["w"]\n'
SKIPS = ("list of scopes", "{ from = TENSOR, to = TENSOR }")
NAMES = "names of operators or initializers"
AXIS = "dimension of the weights, from 0"
RATIOS = "different numbers between 0 and 1, for instance [0.25, 0.5]"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[depth]", ("TOML", "Expected ']]'", "at line 1, column 8")),
        ("", ("no [[depth]] and no [[width]]", "at least one")),
        ("depth = 3", ("depth = 3", "[[depth]]")),
        ("[depht]\n" + DEPTH, ("depht = {}", "depth, norm, points, width")),
        (DEPTH + "skp = 1", ("depth.skp = 1", "skip")),
        ("[[depth]]\n", ("depth.skip = None", *SKIPS)),
        ("[[depth]]\nskip = []", ("depth.skip = []", *SKIPS)),
        ('[[depth]]\nskip = ["/"]', ("depth.skip = '/'", *SKIPS)),
        ('[[depth]]\nskip = [{ from = "a" }]', ("depth.skip = {'from': 'a'}", *SKIPS)),
        ('[[depth]]\nskip = ["/a", "/a/"]', ("depth.skip = '/a'", "once", "twice")),
        (DEPTH + DEPTH, ("depth.skip = '/a'", "once", "twice")),
        (WIDTH, ("width.ratios = None", RATIOS)),
        (WIDTH + "ratios = []", ("width.ratios = []", RATIOS)),
        (WIDTH + "ratios = 0.5", ("width.ratios = 0.5", RATIOS)),
        (WIDTH + "ratios = [0.5, 0.5]", ("width.ratios = [0.5, 0.5]", RATIOS)),
        (WIDTH + "ratios = [0.5, 1.0]", ("width.ratios = [0.5, 1.0]", RATIOS, "1 is always")),
        (WIDTH + "ratios = [0.0]", ("width.ratios = [0.0]", RATIOS, "1 is always")),
        (WIDTH + "ratios = [nan]", ("width.ratios = [nan]", RATIOS, "1 is always")),
        (WIDTH + 'ratios = ["a"]', ("width.ratios = ['a']", RATIOS, "1 is always")),
        ("[[width]]\nratios = [0.5]", ("width.weights = None", NAMES)),
        ('[[width]]\nweights = "w"\nratios = [0.5]', ("width.weights = 'w'", NAMES)),
        (2 * (WIDTH + "ratios = [0.5]\n"), ("width.weights = 'w'", "once", "twice")),
        (WIDTH + "ratios = [0.5]\naxis = -1", ("width.axis = -1", AXIS)),
        (WIDTH + "ratios = [0.5]\naxis = true", ("width.axis = True", AXIS)),
        (WIDTH + "ratios = [0.5]\nparts = 0", ("width.parts = 0", "at least 1")),
        (DEPTH + "[norm]\nlayers = 'some'", ("norm.layers = 'some'", "'auto', 'none' or a list")),
        (DEPTH + "[norm]\nlayers = []", ("norm.layers = []", "'auto', 'none' or a list")),
        (DEPTH + "[points]\nkeep = 0", ("points.keep = 0", "at least 1")),
        (DEPTH + "[points]\nkeep = 2.5", ("points.keep = 2.5", "at least 1")),
        (DEPTH + "[points]\nkept = 2", ("points.kept = 2", "keep")),
        ("norm = 1\n" + DEPTH, ("norm = 1", "[norm]")),
    ],
)  # fmt: skip
def test_what_no_spec_says_is_refused_in_one_line(tmp_path: Path, text: str, message: Told) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ElasticSpecError) as caught:
        read_spec(path)
    told = str(caught.value)
    assert "\n" not in told
    assert told.startswith(f"{path}: ")
    tells(told, *message)


def test_of_several_tables_the_one_is_named(tmp_path: Path) -> None:
    text = WIDTH + "ratios = [0.5]\n[[width]]\nweights = ['v']\nratios = [2.0]"
    with pytest.raises(ElasticSpecError, match=r"width\[1\]\.ratios = \[2\.0\]"):
        read_spec(written(tmp_path, text))


def test_files_that_are_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(ElasticSpecError, match=facts("No such file or directory")):
        read_spec(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ElasticSpecError, match="is not TOML"):
        read_spec(tmp_path / "binary.toml")


def spec(*, blocks: int = 3, ratios: tuple[float, ...] = (0.25, 0.5)) -> ElasticSpec:
    skip = tuple(Skip(scope=f"/{i}") for i in range(blocks))
    return ElasticSpec(
        depths=(DepthGroup(skip=skip),), widths=(WidthGroup(weights=("w",), ratios=ratios),)
    )


def test_choices_are_all_the_largest_first() -> None:
    found = spec(blocks=1)
    assert [found.describe(choice) for choice in found.choices()] == [
        "depth 1 of 1, width 1",
        "depth 1 of 1, width 0.5",
        "depth 0 of 1, width 1",
        "depth 1 of 1, width 0.25",
        "depth 0 of 1, width 0.5",
        "depth 0 of 1, width 0.25",
    ]
    assert found.count == 6
    assert found.choices()[0] == found.full
    assert found.choices()[-1] == found.smallest


def test_groups_of_a_kind_are_described_together() -> None:
    two = ElasticSpec(
        depths=(DepthGroup(skip=(Skip(scope="/a"),)), DepthGroup(skip=(Skip(scope="/b"),))),
    )
    assert two.describe(SubnetChoice(skipped=(1, 0), ratios=())) == "depth 0 of 1 + 1 of 1"
    widths = ElasticSpec(widths=tuple(WidthGroup(weights=(w,), ratios=(0.5,)) for w in "ab"))
    assert widths.describe(SubnetChoice(skipped=(), ratios=(0.5, 1.0))) == "width 0.5 + 1"


def test_too_many_choices_are_not_listed() -> None:
    many = ElasticSpec(
        widths=tuple(WidthGroup(weights=(str(i),), ratios=(0.5,)) for i in range(15))
    )
    with pytest.raises(
        ElasticSpecError, match=facts("spec", "32,768 subnets", "20,000", "[[width]]", "search")
    ):
        many.choices()


@pytest.mark.parametrize(
    "choice",
    [
        SubnetChoice(skipped=(4,), ratios=(1.0,)),
        SubnetChoice(skipped=(0,), ratios=(0.3,)),
        SubnetChoice(skipped=(), ratios=(1.0,)),
        SubnetChoice(skipped=(0,), ratios=()),
    ],
)
def test_what_is_none_of_the_choices_is_refused(choice: SubnetChoice) -> None:
    with pytest.raises(ElasticSpecError, match=facts("skip at most [3]", "[[1.0, 0.5, 0.25]]")):
        spec().check(choice)


def test_neighbours_differ_by_one_step_of_one_group() -> None:
    found = spec()
    for choice in found.choices():
        found.check(choice)
        for other in found.neighbours(choice):
            found.check(other)
            assert choice in found.neighbours(other)
            assert (choice.skipped != other.skipped) + (choice.ratios != other.ratios) == 1
    middle = SubnetChoice(skipped=(1,), ratios=(0.5,))
    assert len(list(found.neighbours(middle))) == 4
