"""Archives that claim more than they hold, or hold what is not asked for, are refused unread."""

from __future__ import annotations

import io
import os
import tracemalloc
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.facts import Told, facts
from tests.fuzz.bundles import header

from offramp.bundle.npz import ArrayForm, NpzError, open_regular, read_npz

MIB = 2**20


def archive(members: Mapping[str, bytes], method: int = zipfile.ZIP_STORED) -> io.BytesIO:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as made:
        for name, content in members.items():
            made.writestr(name, content)
    return stream


def saved(**arrays: Any) -> io.BytesIO:
    stream = io.BytesIO()
    np.savez_compressed(stream, **arrays)
    return stream


def test_what_numpy_writes_is_read_as_numpy_reads_it() -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "plain": rng.random((3, 4)),
        "fortran": np.asfortranarray(rng.random((3, 4))),
        "text": np.array("säge"),
        "scalar": np.array(3, np.uint8),
        "empty": np.zeros((0, 5000), np.float32),
        "times": np.array(["2026-01-02"], "M8[D]"),
        "big endian": np.arange(3, dtype=">i4"),
        "long": np.zeros((1000, 1000), np.float16),
    }
    found = read_npz(saved(**arrays), max_bytes=16 * MIB)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(found[name], array)
        assert found[name].flags.writeable


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header("<f8", (2**40,)) + bytes(64), ("float64 [1099511627776]",)),
        (header("<f8", (2**62, 2**62)) + bytes(64), ("but it has 64 bytes",)),
        (header("<f4", (-1, -16)) + bytes(64), ("but it has 64 bytes",)),
        (header("<f4", (0, -1)), ("but it has 0 bytes",)),
        (header("<f4", (0, 2**62)), ("but it has 0 bytes",)),
        (header("<f4", (15,)) + bytes(64), ("but it has 64 bytes",)),
        (header("|O", (3,)) + bytes(64), ("Python objects", "allow_pickle")),
        (header("<U0", (2**60,)), ("<U0", "numbers")),
        (header([("a", "<f4")], (1,)) + bytes(4), ("expected numbers",)),
        (header("junk", (1,)), ("ValueError", "junk")),
        (b"\x93NUMPY\x09\x00" + bytes(64), ("9", "0", "1.0 or 2.0")),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + bytes(64), ("ValueError",)),
        (b"not numpy's", ("ValueError", "magic string")),
        (b"", ("ValueError: EOF",)),
    ],
)
def test_an_inconsistent_header_is_refused(content: bytes, message: Told) -> None:
    with pytest.raises(NpzError, match=facts(*message)) as caught:
        read_npz(archive({"x.npy": content}), max_bytes=2**62)
    assert "\n" not in str(caught.value)


def test_a_bomb_is_refused_before_it_goes_off() -> None:
    stream = archive({"x.npy": header("<f8", (8 * MIB,)) + bytes(64 * MIB)}, zipfile.ZIP_DEFLATED)
    assert len(stream.getvalue()) < MIB
    tracemalloc.start()
    with pytest.raises(NpzError, match=facts("67,108,9", "at most 33,554,432")):
        read_npz(stream, max_bytes=32 * MIB)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * MIB


def test_a_directory_that_claims_more_than_is_stored_is_refused() -> None:
    content = bytearray(archive({"x.npy": header("<f8", (1,)) + bytes(8)}).getvalue())
    place = content.rindex(b"PK\x01\x02") + 24  # the uncompressed size in the directory
    content[place : place + 4] = (2**31).to_bytes(4, "little")
    with pytest.raises(NpzError, match=facts("2,147,483,648 bytes", "can hold")):
        read_npz(io.BytesIO(bytes(content)), max_bytes=2**62)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"readme.txt": b"hello"}, "member 'readme.txt' of the npz file is not an array"),
        ({f"{i}.npy": b"" for i in range(10_001)}, "10001 members are more than the 10000"),
    ],
)
def test_members_are_arrays_and_not_without_end(members: dict[str, bytes], message: str) -> None:
    with pytest.raises(NpzError, match=message):
        read_npz(archive(members), max_bytes=MIB)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_members_of_one_name_are_refused() -> None:
    stream = saved(x=np.zeros(3))
    with zipfile.ZipFile(stream, "a") as made:
        made.writestr("x.npy", header("<f8", ()) + bytes(8))
    with pytest.raises(NpzError, match="two of its members have the same name"):
        read_npz(stream, max_bytes=MIB)


def test_a_method_that_numpy_does_not_write_is_refused() -> None:
    stream = archive({"x.npy": header("<f8", ()) + bytes(8)}, zipfile.ZIP_LZMA)
    with pytest.raises(NpzError, match="compressed in a way numpy does not"):
        read_npz(stream, max_bytes=MIB)


@pytest.mark.parametrize("cut", [0, 10, 100, -30])
def test_a_cut_archive_is_refused(cut: int) -> None:
    content = saved(x=np.arange(100)).getvalue()
    with pytest.raises(NpzError, match="BadZipFile"):
        read_npz(io.BytesIO(content[:cut]), max_bytes=MIB)


def test_a_changed_byte_of_an_array_is_noticed() -> None:
    stream = io.BytesIO()
    np.savez(stream, x=np.arange(100))
    content = bytearray(stream.getvalue())
    content[500] ^= 1
    with pytest.raises(NpzError, match="Bad CRC-32"):
        read_npz(io.BytesIO(bytes(content)), max_bytes=MIB)


FORMS = {
    "x": ArrayForm(dtype="float32", ndim=2),
    "label": ArrayForm(dtype="int64", ndim=1, optional=True),
}


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, ("missing arrays ['x']",)),
        ({"x": np.zeros((1, 1), np.float32), "y": 1}, ("unknown arrays ['y']",)),
        ({"x": np.zeros((1, 1))}, ("'x' is float64 [1, 1]", "float32 of 2 dimensions")),
        ({"x": np.zeros(1, np.float32)}, ("'x' is float32 [1]", "float32 of 2 dimensions")),
    ],
)
def test_arrays_have_the_form_that_is_expected(arrays: dict[str, Any], message: Told) -> None:
    with pytest.raises(NpzError, match=facts(*message)):
        read_npz(saved(**arrays), max_bytes=MIB, expected=FORMS)


def test_an_optional_array_may_be_missing() -> None:
    assert read_npz(saved(x=np.zeros((1, 1), "f4")), max_bytes=MIB, expected=FORMS).keys() == {"x"}


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match=facts("pipe or a device", "regular file")):
        open_regular(tmp_path / "pipe")
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
