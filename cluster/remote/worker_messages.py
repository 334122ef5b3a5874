"""The messages between a router and its workers, sans I/O; pickle is not used.

A frame is a head, a header and a body. The header is one of the messages here: a byte for its kind,
then JSON; the two messages of every run have packed fields instead of JSON. The body has the inline
arrays: their bytes, one array after the other, each beginning at a multiple of :data:`ALIGNMENT`.

Malformed data raise a :class:`FrameError`; sizes are checked before memory is allocated.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offramp.bundle.schema.errors import BundleSchemaError
from offramp.bundle.schema.serde import from_plain, to_plain
from offramp.engine.common.errors import EngineError

HEAD: Final = struct.Struct("<4sIQ")
"""Format of a head: magic, number of bytes in the header, number of bytes in the body."""
MAGIC: Final = b"EEW1"
MOST_HEADER: Final = 1 << 20
MOST_BODY: Final = 1 << 32
ALIGNMENT: Final = 64
INLINE: Final = -1
"""Place of an array whose bytes are in the body."""
GIVEN: Final = -2
"""Place of a carried tensor (one for the next stage) that is an input of the run, unchanged."""
DTYPES: Final = tuple(
    np.dtype(name)
    for name in (
        *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
)
_CODES: Final = {dtype: code for code, dtype in enumerate(DTYPES)}
_RUN: Final = struct.Struct("<BQIdqqH")
_DONE: Final = struct.Struct("<BBH")
_ARRAY: Final = struct.Struct("<Hq")
_MOST_DIMENSIONS: Final = 32


class FrameError(EngineError):
    """Bytes that are not a message, or a message that is not valid at this point."""


class LargeBodyError(FrameError):
    """The body of a frame exceeds the receiver's limit; its data are dropped."""


class TensorForm(NamedTuple):
    """The name, dtype and shape of an array."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Number of bytes of all elements."""
        return self.dtype.itemsize * math.prod(self.shape)


class PlacedArray(NamedTuple):
    """An array and its place: an offset in shared memory, :data:`INLINE` or :data:`GIVEN`."""

    form: TensorForm
    place: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first message of a router: the worker's options."""

    version: str
    """Version of Offramp, which must be the same at both ends."""
    backend: str
    """One of :data:`offramp.engine.backends.BACKENDS`, except ``auto``."""
    threads: int
    """Number of intra-op threads of each stage, on the CPU."""
    device: str = ""
    """GPU on the worker's host, for instance ``cuda:1``; empty for the CPU."""
    graphs: bool = True
    """``True`` if stages are captured into CUDA graphs, on a GPU."""
    max_rows: int = 32
    """Largest number of rows in a batch; engines may have a lower limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """The order to load a stage under a number; the body is its graph, if that is sent."""

    stage: int
    document: str
    """Name or description of the stage: see :mod:`.stage_orders`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """The order to forget a stage."""

    stage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSlot:
    """The order to serve a slot on the connection sent with the order, or to change its memory.

    File descriptors are sent with the order: the shared memory, and the connection if the slot is
    new.
    """

    slot: int
    size_bytes: int
    """Size of the slot's shared memory, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinSlot:
    """The first message of a network connection for a slot, rather than for orders."""

    session: str
    """Name of the session from the handshake of the connection for orders."""
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    """Request for a sign of life, so that both ends notice a lost connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown:
    """The router's order that the worker ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The answer of a worker that executed an order."""

    pid: int
    cpu_s: float = 0.0
    """CPU seconds that the worker has used, if the order was a ping; else 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The answer of a worker that cannot accept the options of a hello."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The answer of a worker that could not load or run a stage; the worker stays usable."""

    message: str


class RunStage(NamedTuple):
    """The order to run a stage on a batch."""

    stage: int
    rows: int
    threshold: float | None
    """Threshold as for :meth:`offramp.engine.backends.Slot.run`."""
    region: tuple[int, int]
    """Offset and size of the shared memory for results."""
    arrays: tuple[PlacedArray, ...]


class StageDone(NamedTuple):
    """The answer with a stage's results."""

    answer: PlacedArray | None
    confidence: PlacedArray
    carried: tuple[PlacedArray, ...] | None
    """Tensors for the next stage (carried); ``None`` after the last stage."""


Message: TypeAlias = (
    Hello
    | Prepare
    | Release
    | OpenSlot
    | JoinSlot
    | Ping
    | Shutdown
    | Ready
    | Refused
    | Failed
    | RunStage
    | StageDone
)

_PLAIN: Final = (
    Hello,
    Prepare,
    Release,
    OpenSlot,
    Shutdown,
    Ready,
    Refused,
    Failed,
    JoinSlot,
    Ping,
)
_RUN_KIND: Final = len(_PLAIN)
_DONE_KIND: Final = _RUN_KIND + 1


def encode(message: Message) -> bytes:
    """Encode a message's header; FrameError for an array of a dtype that cannot be sent."""
    if isinstance(message, RunStage):
        threshold = math.nan if message.threshold is None else message.threshold
        numbers = (message.stage, message.rows, threshold, *message.region, len(message.arrays))
        return b"".join((_RUN.pack(_RUN_KIND, *numbers), *map(_encode_array, message.arrays)))
    if isinstance(message, StageDone):
        answer = () if message.answer is None else (message.answer,)
        carried = message.carried or ()
        flags = len(answer) | (2 if message.carried is not None else 0)
        head = _DONE.pack(_DONE_KIND, flags, len(carried))
        arrays = (*answer, message.confidence, *carried)
        return b"".join((head, *map(_encode_array, arrays)))
    plain = {key: _quoted(value) for key, value in to_plain(message).items()}
    text = json.dumps(plain, separators=(",", ":"))
    return bytes((_PLAIN.index(type(message)),)) + text.encode("ascii")


def decode(header: bytes) -> Message:
    """Decode a header; FrameError if it is malformed."""
    kind = header[0] if header else 255
    if kind == _RUN_KIND:
        return _decode_run(header)
    if kind == _DONE_KIND:
        return _decode_done(header)
    if kind >= len(_PLAIN):
        raise FrameError(f"there is no message of kind {kind}, expected 0 to {_DONE_KIND}")
    try:
        plain = json.loads(header[1:].decode("ascii"))
        message: Any = from_plain(_PLAIN[kind], plain, _PLAIN[kind].__name__.lower())
        texts = {f.name: getattr(message, f.name) for f in fields(message)}
        message = replace(message, **{name: _unquoted(value) for name, value in texts.items()})
    except (ValueError, RecursionError, BundleSchemaError) as error:
        raise FrameError(f"a message of kind {kind} is malformed: {error!s:.200}") from error
    found: Message = message
    return found


def pack_head(header: bytes, body_bytes: int) -> bytes:
    """Encode the head of a frame; FrameError if the frame is too large."""
    _check_sizes(len(header), body_bytes)
    return HEAD.pack(MAGIC, len(header), body_bytes)


@lru_cache(maxsize=1024)
def unpack_head(head: bytes) -> tuple[int, int]:
    """Decode a frame's head to the bytes of its header and body; FrameError if it is invalid."""
    magic, header_bytes, body_bytes = HEAD.unpack(head)
    if magic != MAGIC:
        raise FrameError(f"a frame begins with {magic!r}, expected {MAGIC!r}")
    _check_sizes(header_bytes, body_bytes)
    return header_bytes, body_bytes


def inline_offsets(arrays: Sequence[PlacedArray], body_bytes: int) -> list[int]:
    """Return the offset of each inline array in the body, −1 for other arrays.

    FrameError if their total size differs from the body's.
    """
    offsets, end = [], 0
    for form, place in arrays:
        if place != INLINE:
            offsets.append(-1)
            continue
        start = aligned(end)
        offsets.append(start)
        end = start + form.size_bytes
    if end != body_bytes:
        raise FrameError(f"a body has {body_bytes} bytes, but its arrays need {end}")
    return offsets


def aligned(offset: int) -> int:
    """Round an offset up to the next offset at which an array may begin."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def array_in(body: bytearray, form: TensorForm, offset: int) -> NDArray[Any]:
    """Return a view of an inline array."""
    return np.ndarray(form.shape, form.dtype, body, offset)


def _quoted(value: Any) -> Any:
    """Escape text to ASCII: error messages may have any characters."""
    return json.dumps(value)[1:-1] if isinstance(value, str) else value


def _unquoted(value: Any) -> Any:
    return json.loads(f'"{value}"') if isinstance(value, str) else value


def _check_sizes(header_bytes: int, body_bytes: int) -> None:
    if not 0 < header_bytes <= MOST_HEADER or body_bytes > MOST_BODY:
        raise FrameError(
            f"a frame has {header_bytes} and {body_bytes} bytes, expected 1 to {MOST_HEADER} and "
            f"at most {MOST_BODY}; send smaller batches"
        )


def _encode_array(array: PlacedArray) -> bytes:
    form, place = array
    encoded = _encode_form(form)
    return _ARRAY.pack(len(encoded), place) + encoded


@lru_cache(maxsize=4096)
def _encode_form(form: TensorForm) -> bytes:
    code = _CODES.get(form.dtype)
    if code is None or len(form.shape) > _MOST_DIMENSIONS:
        known = ", ".join(map(str, DTYPES))
        raise FrameError(
            f"tensor {form.name!r:.60} of dtype {form.dtype} with {len(form.shape)} dimensions "
            f"cannot be sent to a worker, expected one of {known}; serve without workers"
        )
    name = form.name.encode(errors="surrogatepass")
    shape = struct.pack(f"<{len(form.shape)}q", *form.shape)
    return bytes((code, len(form.shape))) + shape + name


@lru_cache(maxsize=4096)
def _decode_form(encoded: bytes) -> TensorForm:
    if len(encoded) < 2 or encoded[0] >= len(DTYPES) or encoded[1] > _MOST_DIMENSIONS:
        raise FrameError(f"the description of an array is malformed: {encoded[:20]!r}")
    dtype, end = DTYPES[encoded[0]], 2 + 8 * encoded[1]
    if len(encoded) < end:
        raise FrameError(f"the shape of an array ends after {len(encoded) - 2} bytes")
    shape = struct.unpack(f"<{encoded[1]}q", encoded[2:end])
    try:
        form = TensorForm(encoded[end:].decode(errors="surrogatepass"), dtype, shape)
    except UnicodeDecodeError as error:
        raise FrameError(f"the name of an array is not text: {error}") from error
    largest = math.prod([max(size, 1) for size in shape])  # numpy multiplies sizes like this
    if min(shape, default=0) < 0 or dtype.itemsize * largest > MOST_BODY:
        raise FrameError(
            f"an array has the shape {list(shape)!s:.100}, which is negative or too large"
        )
    return form


def _decode_arrays(header: bytes, start: int, count: int) -> tuple[PlacedArray, ...]:
    arrays: list[PlacedArray] = []
    for _ in range(count):
        if start + _ARRAY.size > len(header):
            raise FrameError(f"a message ends before its {count} arrays do")
        length, place = _ARRAY.unpack_from(header, start)
        start += _ARRAY.size
        if start + length > len(header) or place < GIVEN:
            raise FrameError(
                f"array {len(arrays)} has {length} bytes at {place}, outside of its message"
            )
        arrays.append(PlacedArray(_decode_form(header[start : start + length]), place))
        start += length
    if start != len(header):
        raise FrameError(f"a message has {len(header) - start} more bytes after its arrays")
    return tuple(arrays)


def _decode_run(header: bytes) -> RunStage:
    if len(header) < _RUN.size:
        raise FrameError(f"an order to run a stage has {len(header)} bytes")
    _, stage, rows, threshold, offset, size, count = _RUN.unpack_from(header)
    arrays = _decode_arrays(header, _RUN.size, count)
    if offset < 0 or size < 0 or rows < 1:
        raise FrameError(
            f"an order to run {rows} rows names {size} bytes at {offset}, expected no negative "
            "number and at least one row"
        )
    _check_names(arrays)
    least = None if math.isnan(threshold) else threshold
    return RunStage(stage, rows, least, (offset, size), arrays)


def _decode_done(header: bytes) -> StageDone:
    if len(header) < _DONE.size:
        raise FrameError(f"the result of a stage has {len(header)} bytes")
    _, flags, count = _DONE.unpack_from(header)
    answers = flags & 1
    if flags > 3 or (count and not flags & 2):
        raise FrameError(
            f"the result of a stage has flags {flags} and {count} tensors for the next stage"
        )
    arrays = _decode_arrays(header, _DONE.size, answers + 1 + count)
    carried = arrays[answers + 1 :]
    _check_names(carried)
    answer = arrays[0] if answers else None
    return StageDone(answer, arrays[answers], carried if flags & 2 else None)


def _check_names(arrays: Sequence[PlacedArray]) -> None:
    if len({form.name for form, _ in arrays}) < len(arrays):
        raise FrameError("two arrays of a message have the same name")
