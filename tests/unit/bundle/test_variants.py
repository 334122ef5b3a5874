"""Bundles with variants: what their manifest must say, and how they show themselves as each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.facts import Told, facts
from tests.unit.bundle import examples
from tests.unit.bundle.cascades import CASCADE_FILES, CASCADE_PROFILE, OWN, SEGMENTS
from tests.unit.bundle.examples import MANIFEST, rewrite_manifest

from offramp.bundle import Bundle, BundleSchemaError, ExitPolicy, SharingCost, Variant
from offramp.bundle.files import dump
from offramp.bundle.schema.parts import folder_of

FIRST = replace(MANIFEST.exits[0], inputs=("q/cut",))
NOTHING = ExitPolicy(version=4, active=())


def variant(index: int = 1, name: str = "depth 1 of 2") -> Variant:
    folder = folder_of(index)
    *own, source = SEGMENTS
    return Variant(
        index=index,
        name=name,
        segments=(*(replace(s, file=folder + s.file) for s in own), source),
        exits=tuple(replace(e, file=folder + e.file) for e in (FIRST, OWN)),
    )


def files(*variants: Variant) -> dict[str, Any]:
    found: dict[str, Any] = dict(examples.FILES)
    for each in variants:
        contents = {**CASCADE_FILES, "profiles/cpu.json": dump(CASCADE_PROFILE)}
        for name in ("segments/00.onnx", "segments/01.onnx", "exits/00.onnx", "exits/01.onnx"):
            found[each.folder + name] = contents[name]
        found[each.folder + "profiles/cpu.json"] = contents["profiles/cpu.json"]
        found[each.folder + "policy.json"] = dump(NOTHING)
    return found


def write(folder: Path, *variants: Variant) -> Bundle:
    manifest = replace(MANIFEST, variants=variants)
    return examples.write(folder, manifest=manifest, files=files(*variants))


def test_variants_are_read_as_they_were_written(tmp_path: Path) -> None:
    written = write(tmp_path, variant(1), variant(2, "depth 1 of 2, width 0.5"))
    bundle = Bundle.open(written.path)
    assert [v.name for v in bundle.manifest.variants] == ["depth 1 of 2", "depth 1 of 2, width 0.5"]
    assert [v.folder for v in bundle.manifest.variants] == ["variants/1/", "variants/2/"]
    assert [v.agreement for v in bundle.manifest.variants] == [0.99, 0.99]
    full, first, second = bundle.variants()
    assert full is bundle
    assert (first.number, second.number) == (1, 2)
    assert first.manifest.subnet == "depth 1 of 2"
    assert first.manifest.is_cascade
    assert first.manifest.source_begins == 2
    assert first.policy == NOTHING != full.policy
    assert first.profile() == CASCADE_PROFILE
    assert first.read("variants/1/segments/00.onnx") == CASCADE_FILES["segments/00.onnx"]
    assert not full.manifest.is_cascade


def test_a_bundle_without_variants_says_nothing_of_them(tmp_path: Path) -> None:
    plain = json.loads(dump(MANIFEST))
    assert "variants" not in plain
    assert "subnet" not in plain
    assert Bundle.open(examples.write(tmp_path).path).variants()[1:] == ()


def second(plain: dict[str, Any]) -> None:
    plain["variants"][0]["index"] = 2


def elsewhere(plain: dict[str, Any]) -> None:
    plain["variants"][0]["segments"][0]["file"] = "segments/00.onnx"


def nameless(plain: dict[str, Any]) -> None:
    plain["variants"][0]["name"] = ""


def ownless(plain: dict[str, Any]) -> None:
    del plain["variants"][0]["exits"][-1]


def sourceless(plain: dict[str, Any]) -> None:
    plain["variants"][0]["segments"][-1]["file"] = "variants/1/segments/01.onnx"


def twice(plain: dict[str, Any]) -> None:
    again = json.loads(json.dumps(plain["variants"][0]).replace("variants/1/", "variants/2/"))
    plain["variants"].append({**again, "index": 2})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (second, ("variants", "from 1")),
        (elsewhere, ("variants[0]", "'segments/00.onnx'", "variants/1/")),
        (nameless, ("name",)),
        (ownless, ("'depth 1 of 2'", "own answer")),
        (sourceless, ("'source.onnx'", "subnet")),
        (twice, ("variants", "'depth 1 of 2'", "twice")),
    ],
)
def test_variants_that_are_none_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], told: Told
) -> None:
    path = write(tmp_path, variant()).path
    rewrite_manifest(path, change)
    with pytest.raises(BundleSchemaError, match=facts(*told)):
        Bundle.open(path)


COSTS = tuple(
    SharingCost(variant=number, time_ratio=1.2, half_width=0.02, packed_bytes=3 * 2**20)
    for number in range(2)
)


def test_what_sharing_weights_costs_is_read_as_it_was_written(tmp_path: Path) -> None:
    manifest = replace(MANIFEST, variants=(variant(),), weight_sharing=COSTS)
    written = examples.write(tmp_path, manifest=manifest, files=files(variant()))
    bundle = Bundle.open(written.path)
    assert bundle.manifest.weight_sharing == COSTS
    assert bundle.variant(1).manifest.weight_sharing == ()
    told = "20 % longer (measured), 3.0 MiB less of its own (counted)"
    assert COSTS[1].describe() == told
    assert replace(COSTS[1], time_ratio=0.99).describe().startswith("no longer (measured)")


def test_bundles_where_it_was_not_measured_say_nothing_of_it(tmp_path: Path) -> None:
    """Older ones do not: they are read."""
    bundle = write(tmp_path, variant())
    assert "weight_sharing" not in json.loads((bundle.path / "manifest.json").read_text())
    assert Bundle.open(bundle.path).manifest.weight_sharing == ()


def test_what_sharing_costs_is_said_of_all_or_none() -> None:
    with pytest.raises(ValueError, match=facts("weight_sharing", "[0]", "0 to 1")):
        replace(MANIFEST, variants=(variant(),), weight_sharing=COSTS[:1])
    with pytest.raises(ValueError, match="time_ratio has 0"):
        replace(COSTS[0], time_ratio=0.0)


def test_a_variants_policy_names_its_own_exits(tmp_path: Path) -> None:
    contents = files(variant())
    names_more = b'{"version": 1, "active": [{"exit": 7, "threshold": 0.5}], "promise": null}'
    contents["variants/1/policy.json"] = names_more
    manifest = replace(MANIFEST, variants=(variant(),))
    with pytest.raises(BundleSchemaError, match=facts("variants/1/policy.json", "exit")):
        examples.write(tmp_path, manifest=manifest, files=contents)
