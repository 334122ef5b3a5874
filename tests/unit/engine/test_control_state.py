"""A kept state comes back as it was, or not at all; nothing about it ever stops a server."""

from __future__ import annotations

import errno
import io
import json
import logging
import math
import os
import re
import tempfile
import threading
import tracemalloc
import zipfile
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tests.facts import Told, facts, tells
from tests.unit.bundle.examples import write

from offramp.bundle import Bundle
from offramp.engine.common.control_state import MAX_BYTES, identity_of, load_state, save_state

HERE = {"bundle": "0123", "controller": "certified", "max_disagreement": "0.01"}
STATE = {
    "version": 3,
    "wealth": -math.inf,
    "exits": [0, 2],
    "nested": {"ready": True, "since": None, "window": np.arange(6, dtype=np.float32)},
    "agrees": np.array([[True], [False]]),
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "m.ee.state.npz"


def saved(place: Path, state: Any = STATE) -> bytes:
    """Save a state; gives the file's content."""
    assert save_state(place, state, fingerprint=HERE)
    return place.read_bytes()


def same(one: Any, other: Any) -> bool:
    """Equal in value and type; NaN equals NaN, −0.0 does not equal 0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return bool(alike and one.tobytes() == other.tobytes())
    if isinstance(one, float):
        return bool(one.hex() == other.hex())
    return bool(one == other)


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(record.levelno, record.getMessage()) for record in caplog.records]


keys = st.text() | st.sampled_from(["$", "$$", "$array", "$$array", "array_0", "document"])
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
numbers = arrays.arrays(
    arrays.scalar_dtypes()
    | arrays.byte_string_dtypes(min_len=1)
    | arrays.unicode_string_dtypes(min_len=1),
    arrays.array_shapes(min_dims=0, min_side=0, max_side=3),
)
values = st.recursive(
    plain | numbers,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(keys, values, max_size=5), st.dictionaries(st.text(), st.text()))
def test_any_state_comes_back_as_it_was(state: dict[str, Any], fingerprint: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "m.state.npz")
        assert save_state(place, state, fingerprint=fingerprint)
        assert same(load_state(place, fingerprint=fingerprint), state)
        assert [entry.name for entry in Path(folder).iterdir()] == ["m.state.npz"]


def test_an_array_keeps_what_is_odd_about_it(place: Path) -> None:
    state = {
        "transposed": np.arange(6).reshape(2, 3).T,
        "strided": np.arange(6)[::2],
        "big endian": np.arange(3, dtype=">i4"),
        "nothing": np.zeros((0, 5)),
        "scalar": np.array(2.5),
    }
    saved(place, state)
    assert same(load_state(place, fingerprint=HERE), state)


def test_a_random_generator_can_be_kept(place: Path) -> None:
    """The state has integers of 128 bits."""
    rng = np.random.default_rng(5)
    saved(place, {"rng": rng.bit_generator.state})
    loaded = load_state(place, fingerprint=HERE)
    assert loaded is not None
    again = np.random.default_rng()
    again.bit_generator.state = loaded["rng"]
    assert again.random() == rng.random()


def test_what_is_nearly_plain_comes_back_plain(place: Path) -> None:
    class Name(StrEnum):
        FIRST = "first"

    state = {"tuple": (1, 2), "f32": np.float32(0.1), "i": np.int64(3), "name": Name.FIRST}
    saved(place, state)
    expected = {"tuple": [1, 2], "f32": float(np.float32(0.1)), "i": 3, "name": "first"}
    assert same(load_state(place, fingerprint=HERE), expected)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (np.array([None]), ("state['a'][1]", "dtype object")),
        (np.zeros(1, dtype=[("x", np.int8)]), ("state['a'][1]", "dtype [('x'")),
        (np.ma.masked_array([1], [True]), ("MaskedArray", "int64")),
        (b"bytes", ("state['a'][1]", "type bytes")),
        ({1, 2}, ("state['a'][1]", "type set")),
        (1j, ("state['a'][1]", "type complex")),
        (np.complex64(1j), ("type complex",)),
        ({7: "seven"}, ("state['a'][1]", "key 7", "strings")),
    ],
)
def test_what_could_not_be_read_again_is_refused(place: Path, value: Any, said: Told) -> None:
    before = saved(place)
    with pytest.raises(TypeError, match=facts(*said)):
        save_state(place, {"a": [0, value]}, fingerprint=HERE)
    assert place.read_bytes() == before


def test_the_last_state_counts(place: Path) -> None:
    for version in range(3):
        saved(place, {"version": version})
    assert load_state(place, fingerprint=HERE) == {"version": 2}


def test_nothing_kept_is_nothing_to_talk_about(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        assert load_state(place, fingerprint=HERE) is None
    assert caplog.records == []


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ({**HERE, "controller": "apparate"}, ("controller (certified, now apparate)",)),
        ({**HERE, "confidence": "0.95"}, ("confidence (none, now 0.95)",)),
        ({"bundle": "0123", "controller": "certified"}, ("max_disagreement (0.01, now none)",)),
        (
            {**HERE, "bundle": "f" * 64, "max_disagreement": "0.02"},
            ("bundle (0123, now ffffffffffffffff)", "max_disagreement (0.01, now 0.02)"),
        ),
    ],
)
def test_a_state_of_other_circumstances_is_left_alone(
    place: Path, now: dict[str, str], said: Told, caplog: pytest.LogCaptureFixture
) -> None:
    content = saved(place)
    with caplog.at_level(logging.DEBUG):
        assert load_state(place, fingerprint=now) is None
    [(level, line)] = lines(caplog)
    assert level == logging.INFO
    tells(line, str(place), "another", *said, "afresh")
    assert place.read_bytes() == content
    assert same(load_state(place, fingerprint=HERE), STATE)


def archive(document: Any, **members: Any) -> bytes:
    """Return possible content of ``save_state``."""
    file = io.BytesIO()
    text = document if isinstance(document, str) else json.dumps(document)
    np.savez(file, document=np.array(text.encode()), **members)
    return file.getvalue()


def test_a_state_of_another_version_is_left_alone(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place.write_bytes(archive({"schema_version": 1, "knowledge": []}))
    with caplog.at_level(logging.DEBUG):
        assert load_state(place, fingerprint=HERE) is None
    ((level, text),) = lines(caplog)
    assert level == logging.INFO
    tells(text, "schema version 1", "2", "afresh")


class Trap:
    """Creates a file if it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.mark),))


def test_pickles_are_not_opened(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    mark = place.with_name("sprung")
    trap = np.empty(1, dtype=object)
    trap[0] = Trap(mark)
    document = {"schema_version": 2, "fingerprint": HERE, "state": {"a": {"$array": 0}}}
    place.write_bytes(archive(document, array_0=trap))
    assert load_state(place, fingerprint=HERE) is None
    assert not mark.exists()
    ((level, text),) = lines(caplog)
    assert level == logging.WARNING
    assert "allow_pickle is off" in text
    with np.load(place, allow_pickle=True) as members:  # it is a trap that works
        members["array_0"]
    assert mark.exists()


GOOD = {"schema_version": 2, "fingerprint": HERE, "state": {}}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not an archive",
        b"PK\x03\x04 nor this",
        archive("{"),
        archive("[" * 100_000),
        archive("7"),
        archive({}),
        archive({**GOOD, "fingerprint": None}),
        archive({**GOOD, "state": [1]}),
        archive({**GOOD, "state": {"a": {"$array": 0}}}),
        archive({**GOOD, "state": {"a": {"$array": "x"}}}, array_1=np.zeros(1)),
    ],
)
def test_foreign_files_are_left_alone(
    place: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    place.write_bytes(content)
    assert load_state(place, fingerprint=HERE) is None
    ((level, text),) = lines(caplog)
    assert level == logging.WARNING
    assert f"{place} is damaged or not a state file" in text
    assert place.read_bytes() == content


def claiming(shape: str, descr: str = "<f8") -> bytes:
    """An archive with an array whose header claims more than there is."""
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}"
    npy = b"\x93NUMPY\x01\x00" + (len(header) + 1).to_bytes(2, "little") + header.encode() + b"\n"
    file = io.BytesIO()
    document = {**GOOD, "state": {"a": {"$array": 0}}}
    np.savez(file, document=np.array(json.dumps(document).encode()))
    with zipfile.ZipFile(file, "a") as members:
        members.writestr("array_0.npy", npy)
    return file.getvalue()


@pytest.mark.parametrize(
    ("shape", "descr"),
    [("(1152921504606846976,)", "<f8"), ("(-1,)", "<f8"), ("(4611686018427387904,)", "|S0")],
)
def test_a_header_that_claims_too_much_allocates_nothing(
    place: Path, shape: str, descr: str, caplog: pytest.LogCaptureFixture
) -> None:
    place.write_bytes(claiming(shape, descr))
    tracemalloc.start()
    assert load_state(place, fingerprint=HERE) is None
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20
    assert re.search("is declared as|dtype .S0, expected numbers", caplog.text)


@pytest.mark.parametrize("packing", [zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
def test_a_bomb_is_not_unpacked(
    place: Path, packing: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A zip bomb of 100 MB in 100 kB, which would be a sound state."""
    saved(place, {"a": np.zeros(12_000_000)})
    with zipfile.ZipFile(place) as members:
        contents = {name: members.read(name) for name in members.namelist()}
    with zipfile.ZipFile(place, "w", packing) as bomb:
        for name, content in contents.items():
            bomb.writestr(name, content)
    assert place.stat().st_size < 2**20
    assert load_state(place, fingerprint=HERE) is None
    assert "at most 33,554,432 are read" in caplog.text or "encrypted" in caplog.text


def test_a_file_of_any_size_is_not_read(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    with place.open("wb") as file:
        file.truncate(2**40)
    assert load_state(place, fingerprint=HERE) is None
    tells(caplog.text, f"{2**40:,} bytes", f"at most {MAX_BYTES:,}")


def test_arrays_of_others_are_no_state(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    np.savez(place, x=np.zeros(3))
    assert load_state(place, fingerprint=HERE) is None
    with place.open("wb") as file:
        np.save(file, np.zeros(3))
    assert load_state(place, fingerprint=HERE) is None
    assert [level for level, _ in lines(caplog)] == [logging.WARNING] * 2


def test_a_state_cut_off_anywhere_is_none(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = saved(place)
    for length in range(len(content)):
        place.write_bytes(content[:length])
        assert load_state(place, fingerprint=HERE) is None
    assert [level for level, _ in lines(caplog)] == [logging.WARNING] * len(content)


@pytest.mark.parametrize("mask", [0x01, 0xFF])
def test_a_state_damaged_anywhere_is_the_same_or_none(place: Path, mask: int) -> None:
    """Some bytes of an archive, a date say, mean nothing; none changes the state."""
    content = saved(place)
    refused = 0
    for index in range(len(content)):
        damaged = bytearray(content)
        damaged[index] ^= mask
        place.write_bytes(damaged)
        loaded = load_state(place, fingerprint=HERE)
        refused += loaded is None
        assert loaded is None or same(loaded, STATE), index
    assert refused > len(content) / 2


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes are those of POSIX")
def test_a_pipe_is_not_waited_for(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.mkfifo(place)
    assert load_state(place, fingerprint=HERE) is None
    assert "expected a regular file" in caplog.text


def test_a_folder_in_its_place_stays(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    place.mkdir()
    assert load_state(place, fingerprint=HERE) is None
    assert not save_state(place, STATE, fingerprint=HERE)
    assert [level for level, _ in lines(caplog)] == [logging.WARNING] * 2
    assert list(place.parent.iterdir()) == [place]


def test_an_unwritable_place_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "later" / "m.state.npz"
    for _ in range(3):
        assert not save_state(place, STATE, fingerprint=HERE)
    ((level, text),) = lines(caplog)
    assert level == logging.WARNING
    assert f"{place} cannot be written" in text
    place.parent.mkdir()
    saved(place)  # and once more after it has worked
    place.unlink()
    place.parent.rmdir()
    assert not save_state(place, STATE, fingerprint=HERE)
    assert len(caplog.records) == 2


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write into any folder"
)
def test_a_read_only_folder_is_told(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = saved(place)
    place.parent.chmod(0o500)
    try:
        assert not save_state(place, {}, fingerprint=HERE)
        assert place.read_bytes() == content
        assert "Permission denied" in caplog.text
    finally:
        place.parent.chmod(0o700)


@pytest.mark.parametrize(
    ("function", "number"), [("fsync", errno.ENOSPC), ("replace", errno.EROFS)]
)
def test_a_state_that_cannot_be_finished_leaves_the_last_one(
    place: Path,
    function: str,
    number: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    content = saved(place)

    def fail(*_: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, function, fail)
    assert not save_state(place, {"version": 4}, fingerprint=HERE)
    assert os.strerror(number) in caplog.text
    assert place.read_bytes() == content
    assert list(place.parent.iterdir()) == [place]


def test_racing_writers_leave_one_whole_state(place: Path) -> None:
    """A reader always finds one state or the other."""
    states = [{"who": n, "counts": np.full(2000, n)} for n in range(3)]
    saved(place, states[0])
    barrier = threading.Barrier(len(states) + 1)
    kept: list[bool] = []

    def write_often(state: dict[str, Any]) -> None:
        barrier.wait()
        kept.extend(save_state(place, state, fingerprint=HERE) for _ in range(30))

    threads = [threading.Thread(target=write_often, args=(state,)) for state in states]
    for thread in threads:
        thread.start()
    barrier.wait()
    while any(thread.is_alive() for thread in threads):
        found = load_state(place, fingerprint=HERE)
        assert found is not None
        assert same(found, states[found["who"]])
    assert kept == [True] * 90
    assert list(place.parent.iterdir()) == [place]


def test_the_identity_of_a_bundle_covers_name_and_files(tmp_path: Path) -> None:
    bundle = write(tmp_path)
    assert identity_of(bundle) == identity_of(Bundle.open(bundle.path))
    assert len(identity_of(bundle)["bundle"]) == 64
    other_name = replace(bundle, manifest=replace(bundle.manifest, name="other"))
    first, *rest = bundle.manifest.files
    changed = (replace(first, sha256="0" * 64), *rest)
    other_file = replace(bundle, manifest=replace(bundle.manifest, files=changed))
    assert len({identity_of(b)["bundle"] for b in (bundle, other_name, other_file)}) == 3
