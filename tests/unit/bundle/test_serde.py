"""Any value of the schema survives the way through JSON; anything else is refused."""

from __future__ import annotations

import dataclasses
import json
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.facts import Told, facts
from tests.unit.bundle.examples import MANIFEST, POLICY, PROFILE

from offramp.bundle import (
    ActiveExit,
    BundleSchemaError,
    Exit,
    ExitPolicy,
    Head,
    Manifest,
    Profile,
    Promise,
    TensorSpec,
)
from offramp.bundle.schema.parts import HeadScore
from offramp.bundle.schema.serde import from_plain, to_plain

numbers = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(0, 2**40)
shares = st.floats(0, 1, exclude_min=True, exclude_max=True)
texts = st.text(st.characters(exclude_categories=("Cc", "Cs")))

heads = st.builds(
    Head,
    kind=st.sampled_from(["grid", "first", "mean", "attention", "vector"]),
    grid=counts,
    queries=counts,
    hidden=counts,
)
trials = st.builds(
    HeadScore, head=heads, agreement=shares, cost_ms=st.floats(0, 1e6), net_savings=numbers
)
exits = st.builds(
    Exit,
    index=counts,
    after_segment=counts,
    file=texts,
    inputs=st.lists(texts).map(tuple),
    output=texts,
    confidence=texts,
    head=heads,
    agreement=shares,
    accuracy=st.none() | shares,
    trials=st.lists(trials, max_size=3).map(tuple),
)
specs = st.builds(
    TensorSpec,
    name=texts,
    dtype=st.sampled_from(["float32", "float16", "int64", "uint8", "bool"]),
    shape=st.lists(st.integers(0, 9) | texts, max_size=6).map(tuple),
)
promises = st.builds(
    Promise,
    max_disagreement=shares,
    confidence_level=shares,
    certify_samples=st.integers(2**20, 2**40),
    certify_errors=st.integers(0, 2**20),
    p_value=shares,
    predicted_savings=shares,
)
policies = st.builds(
    ExitPolicy,
    version=counts,
    active=st.sets(st.integers(0, 50)).map(
        lambda chosen: tuple(ActiveExit(exit=e, threshold=e / 50) for e in sorted(chosen))
    ),
    promise=st.none() | promises,
)


@given(heads | trials | exits | specs | promises | policies)
def test_values_survive_json(value) -> None:
    document = json.dumps(to_plain(value), allow_nan=False)
    assert from_plain(type(value), json.loads(document), "x") == value


@pytest.mark.parametrize("value", [MANIFEST, POLICY, PROFILE])
def test_the_schemas_survive_json(value: Manifest | ExitPolicy | Profile) -> None:
    document = json.dumps(to_plain(value), allow_nan=False)
    assert from_plain(type(value), json.loads(document), "x") == value


@dataclasses.dataclass(frozen=True)
class Inner:
    number: float | None
    words: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Outer:
    inner: tuple[Inner, ...]
    mark: Literal["a", "b"]
    size: int | str


PLAIN = {"inner": [{"number": 1.5, "words": {"k": "v"}}], "mark": "a", "size": "batch"}


def test_plain_values_become_dataclasses() -> None:
    expected = Outer(inner=(Inner(number=1.5, words={"k": "v"}),), mark="a", size="batch")
    assert from_plain(Outer, PLAIN, "x") == expected
    assert to_plain(expected) == PLAIN


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"inner": [{"number": "1", "words": {}}]}, ("x.inner[0].number", "float", "'1'")),
        ({"inner": [{"number": 1.0, "words": {"k": 2}}]}, ("x.inner[0].words['k']",)),
        ({"inner": {"number": 1.0}}, ("x.inner: expected a list",)),
        ({"inner": [[]]}, ("x.inner[0]: expected an object",)),
        ({"mark": "c"}, ("x.mark", "'a', 'b'", "'c'")),
        ({"mark": ["a"]}, ("x.mark",)),
        ({"size": None}, ("x.size", "type str", "None")),
        ({"size": 1.0}, ("x.size",)),
    ],
)
def test_the_message_names_the_place(change, where: Told) -> None:
    with pytest.raises(BundleSchemaError, match=facts(*where)):
        from_plain(Outer, {**PLAIN, **change}, "x")
