"""POSIX shared memory regions, in which clients on this machine place tensors.

A client registers a region by name, and its requests refer to parts of it instead of carrying
tensors (Triton's extension "system shared memory"). Regions are read and written through a file
descriptor, never mapped: if a client shortens its region it gets an error, whereas a mapping would
crash the server. Data are copied when read, so later changes by a client affect no one.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from offramp.engine.common.errors import BadInputError
from offramp.proto.messages import InferParameter, ModelInferRequest
from offramp.server.common.errors import UnsupportedError

FOLDER: Final = Path("/dev/shm")  # noqa: S108 - location of POSIX shared memory on Linux
MAX_REGIONS: Final = 1024
"""Largest number of registered regions; each takes a file descriptor."""

REGION: Final = "shared_memory_region"
"""Tensor parameter with the name of its region."""
_OFFSET, _SIZE = "shared_memory_offset", "shared_memory_byte_size"


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRegion:
    """A region of shared memory that a client registered."""

    name: str
    key: str
    """Key of ``shm_open``, for instance ``/input``."""
    offset: int
    """Offset of the region in the shared memory, in bytes."""
    size_bytes: int
    descriptor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionPart:
    """The part of a region that holds a tensor."""

    region: SharedRegion
    offset: int
    """Offset of the part in the region, in bytes."""
    size_bytes: int

    def read(self) -> bytes:
        """Return a copy of the part; BadInputError if the region was shortened."""
        data = os.pread(self.region.descriptor, self.size_bytes, self.region.offset + self.offset)
        if len(data) != self.size_bytes:
            raise BadInputError(
                f"shared memory region {self.region.name!r} ends {self.size_bytes - len(data)} "
                "bytes before the tensor does: it was shortened after it was registered; register "
                "it again"
            )
        return data

    def write(self, data: bytes, tensor: str) -> None:
        """Write a tensor; BadInputError if it is larger than the part."""
        if len(data) > self.size_bytes:
            raise BadInputError(
                f"output {tensor!r} has {len(data)} bytes, and {self.size_bytes} are reserved in "
                f"shared memory region {self.region.name!r}; reserve as many as the output has"
            )
        os.pwrite(self.region.descriptor, data, self.region.offset + self.offset)


class SharedRegions:
    """The registered regions, by name; used on the event loop's thread."""

    def __init__(self) -> None:
        self._regions: dict[str, SharedRegion] = {}

    def register(self, name: str, key: str, *, offset: int, size_bytes: int) -> None:
        """Open a region.

        Raises:
            BadInputError: The name is used already, the region does not exist, or it is too short.
            UnsupportedError: The system has no file-based POSIX shared memory.
        """
        if not FOLDER.is_dir():
            raise UnsupportedError(
                f"this system has no {FOLDER}, where shared memory is; send tensors in the request"
            )
        if not name:
            raise BadInputError("a shared memory region has no name; choose one")
        if name in self._regions:
            raise BadInputError(
                f"shared memory region {name!r} is registered already; unregister it, or choose "
                "another name"
            )
        if len(self._regions) >= MAX_REGIONS:
            raise BadInputError(
                f"{MAX_REGIONS} shared memory regions are registered, which is the limit; "
                "unregister those that are not used"
            )
        descriptor = _opened(key)
        there = os.fstat(descriptor).st_size
        if not size_bytes or offset + size_bytes > there:
            os.close(descriptor)
            raise BadInputError(
                f"shared memory {key!r} has {there} bytes; region {name!r} from {offset} to "
                f"{offset + size_bytes} is not in it, or is empty"
            )
        self._regions[name] = SharedRegion(
            name=name, key=key, offset=offset, size_bytes=size_bytes, descriptor=descriptor
        )

    def unregister(self, name: str) -> None:
        """Close a region, or all if ``name`` is empty; an unknown name is ignored."""
        for each in [name] if name else [*self._regions]:
            if (region := self._regions.pop(each, None)) is not None:
                os.close(region.descriptor)

    def status(self, name: str) -> Sequence[SharedRegion]:
        """Return a region, or all if ``name`` is empty; BadInputError if there is none."""
        return [self._region(name)] if name else [*self._regions.values()]

    def part(self, parameters: Mapping[str, InferParameter], what: str) -> RegionPart | None:
        """Return a tensor's part of a region; ``None`` if the tensor is in the message.

        Raises:
            BadInputError: The region does not exist, or the part exceeds it.
        """
        if REGION not in parameters:
            return None
        region = self._region(parameters[REGION].string_param)
        offset, size = (_count(parameters, name, what) for name in (_OFFSET, _SIZE))
        if not size or offset + size > region.size_bytes:
            raise BadInputError(
                f"{what} is at {offset} to {offset + size} of shared memory region "
                f"{region.name!r}, which has {region.size_bytes} bytes; set {_OFFSET} and {_SIZE} "
                "within it"
            )
        return RegionPart(region=region, offset=offset, size_bytes=size)

    def close(self) -> None:
        """Unregister and unmap all regions."""
        self.unregister("")

    def _region(self, name: str) -> SharedRegion:
        if name not in self._regions:
            known = ", ".join(map(repr, self._regions)) or "none"
            raise BadInputError(f"there is no shared memory region {name!r}; registered: {known}")
        return self._regions[name]


def shared_bytes(request: ModelInferRequest) -> int:
    """Return the bytes of a request's inputs in shared memory, according to its parameters."""
    return sum(
        tensor.parameters[_SIZE].int64_param
        for tensor in request.inputs
        if REGION in tensor.parameters and _SIZE in tensor.parameters
    )


def _count(parameters: Mapping[str, InferParameter], name: str, what: str) -> int:
    value = parameters[name].int64_param if name in parameters else 0
    if value < 0:
        raise BadInputError(f"{what} has {name} {value}; expected int64_param, at least 0")
    return value


def _opened(key: str) -> int:
    """Return a descriptor of a region, which is a file directly in :data:`FOLDER`."""
    name = key.removeprefix("/")
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise BadInputError(f"shared memory key {key!r:.80} is not /NAME, as of shm_open")
    try:
        descriptor = os.open(FOLDER / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise BadInputError(
            f"shared memory {key!r} cannot be opened: {error.strerror}; create it on the machine "
            "of the server, for its user to read and write"
        ) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BadInputError(f"shared memory {key!r} is not a region of shm_open")
    return descriptor
