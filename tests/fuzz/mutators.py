"""Bytes changed by chance: blindly, or along the fields of protobuf and the members of archives."""

from __future__ import annotations

import io
import warnings
import zipfile
from collections.abc import Callable, Sequence
from random import Random
from typing import Final

INTERESTING: Final = (0, 1, -1, 2, 7, 64, 65, 127, 128, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**40)
_MOST_BYTES: Final = 200_000
"""Copies of copies would grow without end."""


def havoc(data: bytes, random: Random) -> bytes:
    """Change one to six places of any bytes."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 3, 6))):
        random.choice(_HAVOC)(changed, random)
    return bytes(changed[:_MOST_BYTES])


def _flip(data: bytearray, random: Random) -> None:
    if data:
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)


def _set(data: bytearray, random: Random) -> None:
    if data:
        data[random.randrange(len(data))] = random.choice((0, 1, 0x7F, 0x80, 0xFF, 0x20, 0x2F))


def _number(data: bytearray, random: Random) -> None:
    size = random.choice((2, 4, 8))
    value = random.choice(INTERESTING) % (1 << 8 * size)
    place = random.randrange(len(data) + 1)
    data[place : place + size] = value.to_bytes(size, random.choice(("little", "big")))


def _insert(data: bytearray, random: Random) -> None:
    place = random.randrange(len(data) + 1)
    data[place:place] = random.randbytes(random.choice((1, 2, 8, 64)))


def _delete(data: bytearray, random: Random) -> None:
    place = random.randrange(len(data) + 1)
    del data[place : place + random.choice((1, 2, 8, 64, 1024))]


def _double(data: bytearray, random: Random) -> None:
    place = random.randrange(len(data) + 1)
    block = data[place : place + random.choice((1, 4, 16, 256))]
    data[place:place] = block * random.choice((1, 2, 50))


def _truncate(data: bytearray, random: Random) -> None:
    del data[random.randrange(len(data) + 1) :]


_HAVOC: Final[Sequence[Callable[[bytearray, Random], None]]] = (
    *(_flip, _flip, _set, _number, _insert, _delete, _double, _truncate),
)

# Protobuf: https://protobuf.dev/programming-guides/encoding/
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
Field = tuple[int, int, int | bytes]
"""Number, wire type, value."""


def fields_of(data: bytes) -> list[Field] | None:
    """The fields of a message; ``None`` if the bytes are none."""
    fields: list[Field] = []
    place = 0
    while place < len(data):
        read = _varint(data, place)
        if read is None:
            return None
        tag, place = read
        number, kind = tag >> 3, tag & 7
        if number == 0:
            return None
        if kind == _VARINT:
            read = _varint(data, place)
            if read is None:
                return None
            value, place = read
            fields.append((number, kind, value))
            continue
        size = {_FIXED64: 8, _FIXED32: 4}.get(kind)
        if kind == _BYTES:
            read = _varint(data, place)
            if read is None:
                return None
            size, place = read
        if size is None or place + size > len(data):
            return None
        fields.append((number, kind, data[place : place + size]))
        place += size
    return fields


def _varint(data: bytes, place: int) -> tuple[int, int] | None:
    value = shift = 0
    while place < len(data) and shift < 70:
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
    return None


def encode(fields: Sequence[Field]) -> bytes:
    """The message of some fields."""
    out = bytearray()
    for number, kind, value in fields:
        out += _encode_varint(number << 3 | kind)
        if isinstance(value, int):
            out += _encode_varint(value)
        else:
            if kind == _BYTES:
                out += _encode_varint(len(value))
            out += value
    return bytes(out)


def _encode_varint(value: int) -> bytes:
    value %= 1 << 64
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def protobuf(data: bytes, random: Random) -> bytes:
    """Change one field of a message, at any depth; blindly where it is none, or now and then."""
    fields = fields_of(data)
    if not fields or random.random() < 0.15:
        return havoc(data, random)
    index = random.randrange(len(fields))
    number, kind, value = fields[index]
    action = random.randrange(8)
    if action < 4:
        fields[index] = (number, kind, _changed(kind, value, random))
    elif action == 4:
        del fields[index]
    elif action == 5:
        fields[index:index] = [fields[index]] * random.choice((1, 1, 2, 10, 300))
    elif action == 6:
        other = random.randrange(len(fields))
        fields[index], fields[other] = fields[other], fields[index]
    else:
        fields[index] = (random.choice((*range(1, 20), 1000, 2**28)), kind, value)
    return encode(fields)[:_MOST_BYTES]


def _changed(kind: int, value: int | bytes, random: Random) -> int | bytes:
    if isinstance(value, int):
        return random.choice((*INTERESTING, value + 1, value - 1, 2**63, 2**64 - 1))
    if kind != _BYTES:
        return random.randbytes(len(value))
    if value and random.random() < 0.75:
        return protobuf(value, random)
    return random.choice((b"", b"\0", b"x" * 300, b"\xff\xfe", value * 2, random.randbytes(16)))


def archive(data: bytes, random: Random) -> bytes:
    """Change a member of a zip archive, or the archive's own bytes."""
    if random.random() < 0.3:
        return havoc(data, random)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as found:
            members = [(name, found.read(name)) for name in found.namelist()]
    except Exception:  # it was changed before, so that it is no archive any more
        return havoc(data, random)
    if not members:
        return havoc(data, random)
    index = random.randrange(len(members))
    name, content = members[index]
    action = random.randrange(8)
    if action == 0:
        del members[index]
    elif action == 1:
        members[index] = (random.choice(("", "../x", "/x", "x" * 300, f"{name}2")), content)
    elif action == 2:
        members.append((f"extra{index}.npy", content))
    elif action < 6 and content.startswith(b"\x93NUMPY"):
        members[index] = (name, _npy(content, random))
    else:
        members[index] = (name, havoc(content, random))
    packed = io.BytesIO()
    with (
        warnings.catch_warnings(action="ignore"),
        zipfile.ZipFile(packed, "w", random.choice((0, 8))) as made,
    ):
        for member, inner in members:
            made.writestr(zipfile.ZipInfo(member or "x"), inner)
    return packed.getvalue()


_SHAPES: Final = ("()", "(0,)", "(1,)", "(-1,)", "(3, 0)", f"({2**40},)", "(2**9,)", f"({2**63},)")
_DTYPES: Final = ("|O", "<f8", "<f4", "<i8", "|b1", "<U4", "<M8[s]", "|V8", "<c16", ">f4", "|S0")


def _npy(content: bytes, random: Random) -> bytes:
    """Another shape or dtype in the header of an array, its bytes as they were."""
    size = int.from_bytes(content[8:10], "little")
    header = content[10 : 10 + size].decode("latin1", errors="replace")
    if random.random() < 0.5:
        before, _, rest = header.partition("'shape': ")
        header = f"{before}'shape': {random.choice(_SHAPES)}{rest[rest.find(')') + 1 :]}"
    else:
        before, _, rest = header.partition("'descr': ")
        header = f"{before}'descr': {random.choice(_DTYPES)!r}{rest[rest.find(',') :]}"
    encoded = header.strip().encode("latin1").ljust(size - 1)[: 2**16 - 2] + b"\n"
    return content[:8] + len(encoded).to_bytes(2, "little") + encoded + content[10 + size :]
