"""Reads what a cubin is for and what it offers; it is an ELF file of 64 bits."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_CUDA_MACHINE = 190
_SYMBOL_TABLE = 2
_ENTRY = 0x10
"""``STO_CUDA_ENTRY`` of a symbol's ``st_other``: a kernel."""


def entry_points(cubin: bytes) -> set[str]:
    """Names of the kernels."""
    found = set()
    for kind, offset, size_bytes, link in sections(cubin):
        if kind == _SYMBOL_TABLE:
            strings = list(sections(cubin))[link][1]
            for at in range(offset, offset + size_bytes, 24):
                name, _, other = struct.unpack_from("<IBB", cubin, at)
                if other & _ENTRY:
                    start = strings + name
                    found.add(cubin[start : cubin.index(b"\0", start)].decode())
    return found


def sections(cubin: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Type, offset, size and link of each."""
    start, size_bytes, count = (
        struct.unpack_from("<Q", cubin, 40)[0],
        *struct.unpack_from("<HH", cubin, 58),
    )
    for at in range(start, start + size_bytes * count, size_bytes):
        kind = struct.unpack_from("<I", cubin, at + 4)[0]
        yield kind, *struct.unpack_from("<QQI", cubin, at + 24)


def architecture(cubin: bytes) -> str:
    """Return the GPUs that it is for, as the compilers name them."""
    assert cubin[:5] == b"\x7fELF\x02"
    assert struct.unpack_from("<H", cubin, 18)[0] == _CUDA_MACHINE
    flags = struct.unpack_from("<I", cubin, 48)[0]
    # Up to CUDA 12 the lowest byte, since CUDA 13 (ABI 8) the next one.
    return f"sm_{flags >> 8 & 0xFF if cubin[8] >= 8 else flags & 0xFF}"
