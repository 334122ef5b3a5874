"""The part of a cluster file about workers; :mod:`.cluster_file` reads it.

``device`` names a type of ``[devices]``. With ``backend = "tensorrt"`` or ``"cuda"`` a worker runs
on a GPU of its host. The GPU's number may follow the type: ``"cuda:1"`` is GPU 1, of type
``cuda:1`` if this type exists, else of type ``cuda``; ``"h100:0"`` is GPU 0, of type ``h100``.
Without a number the workers of an entry use the GPUs from 0 on, one each.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

GPU_BACKENDS: Final = ("tensorrt", "cuda")
"""Backends of a worker on a GPU."""
_NUMBERED: Final = re.compile(r"(.+):(\d{1,4})")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersEntry:
    """One table ``[[workers]]`` of a cluster file: equal workers at one address."""

    device: str
    """Name of the device type."""
    address: str | None
    """``HOST:PORT`` of a running worker; ``None`` for processes on the router's host."""
    count: int
    """Number of workers that the table stands for."""
    backend: str = ""
    """One of :data:`GPU_BACKENDS`; empty: the CPU, with the server's own backend."""
    gpus: tuple[int, ...] = ()
    """[count]: number of each worker's GPU on its host; empty for the CPU."""

    def shared_gpus(self, other: WorkersEntry) -> list[int]:
        """Return the GPUs of the same host that both entries use."""
        return [gpu for gpu in self.gpus if gpu in other.gpus and self._host == other._host]

    @property
    def _host(self) -> str:
        return "" if self.address is None else self.address.rpartition(":")[0]


def read_device(device: object, backend: object, names: Sequence[str]) -> tuple[str, int | None]:
    """Read the device type of a worker, one of ``names``, and the number of the GPU, if any.

    ValueError if there is no such type, or the type does not fit the backend.
    """
    if backend is not None and backend not in GPU_BACKENDS:
        raise ValueError(
            f"backend = {backend!r:.80}, expected {' or '.join(GPU_BACKENDS)}, on a GPU; omit it "
            "for the CPU, where eeserve --backend applies"
        )
    numbered = _NUMBERED.fullmatch(device) if isinstance(device, str) else None
    number = None if numbered is None else int(numbered[2])
    if isinstance(device, str) and device in names:
        return device, None if backend is None else number
    if numbered is None or numbered[1] not in names:
        shown = ", ".join(name if name.isprintable() else repr(name) for name in names)
        hint = "" if numbered is None else f"; add [devices.{numbered[1]!s:.60}], or name another"
        raise ValueError(
            f"device = {device!r:.80}, expected a type of [devices]: {shown!s:.200}{hint}"
        )
    if backend is None:
        raise ValueError(
            f"device = {device!r:.80} names GPU {number} and has no backend, expected "
            f'backend = "tensorrt" or "cuda" too; or omit ":{number}" for the CPU'
        )
    return numbered[1], number
