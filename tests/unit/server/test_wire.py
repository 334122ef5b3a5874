"""The bytes of requests: what is read of them, and what is refused before it is decoded."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.facts import facts

from offramp.proto import request_bytes, wire_format
from offramp.proto.messages import InferTensorContents, ModelInferRequest
from offramp.proto.request_bytes import (
    MAX_FIELDS,
    MAX_HEAD_BYTES,
    MAX_NAME_CHARS,
    MAX_TYPED_BYTES,
    InferMessage,
    MessageError,
    MessageLimitError,
    split_message,
)
from offramp.proto.tensors import TensorError, decode_tensors

MANY = 1 << 20


def delimited(tag: int, payload: bytes) -> bytes:
    size, encoded = len(payload), bytearray([tag])
    while size >= 0x80:
        encoded.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([*encoded, size]) + payload


def request(datatype: str = "FP32", shape: tuple[int, ...] = (0,), **contents: Any) -> Any:
    made = ModelInferRequest(model_name="fake", id="a")
    filled = InferTensorContents(**contents) if contents else None
    made.inputs.add(name="x", datatype=datatype, shape=shape, contents=filled)
    return made


def read(data: bytes) -> InferMessage:
    return split_message(data).decode()


def arrays(message: InferMessage) -> dict[str, Any]:
    return decode_tensors(message.head.inputs, message.raw_contents, message.floats)


HOSTILE = {
    "inputs": b"\n\x01g" + b"\x2a\x00" * MANY,
    "outputs": b"\x32\x00" * MANY,
    "raw contents": b"\x3a\x00" * MANY,
    "parameters": b"".join(b"\x22\x08\x0a\x06%06x" % number for number in range(MANY // 8)),
    "unknown fields": b"\x50\x01" * MANY,
    "parameters of an input": delimited(0x2A, b"\x22\x00" * MANY),
    "contents of an input": delimited(0x2A, b"\x2a\x00" * MANY),
    "parameters of an output": delimited(0x32, b"\x12\x00" * MANY),
    "unpacked shape": delimited(0x2A, b"\x18\x01" * MANY),
    "packed shape": delimited(0x2A, delimited(0x1A, b"\x01" * MANY)),
    "bytes elements": delimited(0x2A, delimited(0x2A, b"\x42\x00" * MANY)),
    "packed integers": delimited(0x2A, delimited(0x2A, delimited(0x12, b"\x01" * (MANY + 1)))),
    "unpacked floats": delimited(0x2A, delimited(0x2A, b"\x35\x00\x00\x00\x00" * MANY)),
    "floats in two pieces": delimited(
        0x2A, delimited(0x2A, delimited(0x32, bytes(MANY)) + delimited(0x32, bytes(MANY)))
    ),
    "a name": delimited(0x0A, b"a" * MANY),
    "an input's name": delimited(0x2A, delimited(0x0A, b"a" * MANY)),
    "an unknown field": delimited(0x7A, bytes(MANY)),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_what_is_too_much_is_refused_before_it_is_decoded(
    data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_bytes, "ModelInferRequest", None)
    with pytest.raises(MessageLimitError, match=r"expected at most|more than \d+ fields") as caught:
        split_message(data)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("name", ["inputs", "parameters of an input", "raw contents"])
def test_no_more_fields_are_looked_at_than_the_limit(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = 0
    varint_at = wire_format.varint_at

    def counted(*arguments: Any) -> Any:
        nonlocal looked
        looked += 1
        return varint_at(*arguments)

    monkeypatch.setattr(wire_format, "varint_at", counted)
    with pytest.raises(MessageLimitError):
        split_message(HOSTILE[name])
    assert looked <= 2 * (MAX_FIELDS + 1)  # a tag and a length of each


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x2b" * 5000, "wire type 3 at byte 0"),
        (b"\x0a\x01g" + b"\x0f" * 5000, "wire type 7 at byte 3"),
        (bytes([0x3A, 0xFF, 0xFF, 0x7F]) + bytes(5000), "a field at byte 0 that is not whole"),
        (b"\x09" + bytes(7) + b"\x0d" * 4100, "wire type|no ModelInferRequest|not whole"),
        (b"\xff" * 5000, "no whole number at byte 0"),
        (b"\x3a" + b"\x80" * 5000, "no whole number at byte 1"),
        (delimited(0x2A, delimited(0x2A, b"") * 2 + bytes(1) * 0 + delimited(0x0A, b"x" * 5000)),
         "contents twice"),
    ],
)  # fmt: skip
def test_other_bytes_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(MessageError, match=message):
        read(data)


def test_long_names_are_refused() -> None:
    with pytest.raises(MessageLimitError, match="model_name has 1025 characters, expected at most"):
        read(ModelInferRequest(model_name="m" * (MAX_NAME_CHARS + 1)).SerializeToString())
    made = request()
    made.inputs[0].name = "x" * (MAX_NAME_CHARS + 1)
    with pytest.raises(TensorError, match=facts("tensor 0", "1025 characters")):
        arrays(read(made.SerializeToString()))


def test_raw_contents_stay_where_they_are() -> None:
    x = np.arange(4000, dtype=np.uint8)
    made = request("UINT8", (4000,))
    made.inputs.add(name="y", datatype="FP32", shape=[2, 1000])
    made.raw_input_contents.extend([x.tobytes(), bytes(8000)])
    data = made.SerializeToString()
    decoded = arrays(read(data))
    np.testing.assert_array_equal(decoded["x"], x)
    assert decoded["y"].shape == (2, 1000)
    within = decoded["x"].ctypes.data - np.frombuffer(data, np.uint8).ctypes.data
    assert 0 < within < len(data)
    assert not read(data).head.raw_input_contents


@pytest.mark.parametrize("offset", range(8))
def test_arrays_are_aligned_at_any_offset(offset: int) -> None:
    x = np.arange(2000, dtype=np.float64)
    made = request("FP64", (2000,))
    made.id = "i" * offset
    made.raw_input_contents.append(x.tobytes())
    decoded = arrays(read(made.SerializeToString()))["x"]
    assert decoded.flags.aligned
    np.testing.assert_array_equal(decoded, x)


@pytest.mark.parametrize(("datatype", "dtype"), [("FP32", np.float32), ("FP64", np.float64)])
def test_packed_floats_may_be_many(datatype: str, dtype: Any) -> None:
    x = np.random.default_rng(3).normal(size=(2, MAX_TYPED_BYTES // 4)).astype(dtype)
    field = f"{datatype.lower()}_contents"
    made = request(datatype, x.shape, **{field: x.ravel().tolist()})
    made.inputs.add(name="y", datatype="BOOL", shape=[1]).contents.bool_contents.append(True)
    message = read(made.SerializeToString())
    assert not message.head.inputs[0].HasField("contents")
    np.testing.assert_array_equal(arrays(message)["x"], x)
    np.testing.assert_array_equal(arrays(message)["y"], [True])


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (request("FP32", (999,), fp32_contents=[1.0] * 1000), "1000 elements in fp32_contents"),
        (request("FP32", (1000,), fp64_contents=[1.0] * 1000), "belong in fp32_contents"),
        (request("INT32", (1000,), fp32_contents=[1.0] * 1000), "belong in int_contents"),
    ],
)
def test_packed_floats_are_checked_as_others_are(made: Any, message: str) -> None:
    padded = made.SerializeToString() + delimited(0x1A, b"i" * 5000)
    assert read(padded).floats
    with pytest.raises(TensorError, match=message):
        arrays(read(padded))


def test_floats_that_end_within_an_element_are_refused() -> None:
    tensor = delimited(0x0A, b"x") + delimited(0x12, b"FP32") + b"\x18\x01"
    data = delimited(0x2A, tensor + delimited(0x2A, delimited(0x32, bytes(5001))))
    with pytest.raises(TensorError, match=facts("5001 bytes in fp32_contents", "4")):
        arrays(read(data))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2**40, 2**40, 0, 1), r"shape \[1099511627776, .* no array can have"),
        ((2**62, 0), "no array can have"),
        ((1,) * 65, "has 65 dimensions, expected at most 32"),
        ((1,) * 60_000, "has 60000 dimensions"),
        ((2**62, 4), "no array can have"),
    ],
)
@pytest.mark.parametrize("raw", [[b""], []])
def test_shapes_that_no_array_has_are_refused(
    shape: tuple[int, ...], message: str, raw: list[bytes]
) -> None:
    tensor = request("FP32", shape).inputs[0]
    with pytest.raises(TensorError, match=message):
        decode_tensors([tensor], raw)


def test_an_input_of_typed_integers_is_read_in_slices() -> None:
    x = np.arange(300_000, dtype=np.int32)
    parts = split_message(
        request("INT32", (3, 100_000), int_contents=x.tolist()).SerializeToString()
    )
    assert parts.slow
    np.testing.assert_array_equal(arrays(parts.decode())["x"], x.reshape(3, -1))


def test_ordinary_requests_are_decoded_at_once() -> None:
    made = request("FP32", (8, 3, 224, 56))
    made.raw_input_contents.append(bytes(8 * 3 * 224 * 56 * 4))
    assert not split_message(made.SerializeToString()).slow


def test_the_head_may_be_as_large_as_said() -> None:
    made = request()
    made.id = "i" * (MAX_HEAD_BYTES - 100)
    assert read(made.SerializeToString()).head == made
    made.id += "i" * 200
    with pytest.raises(MessageLimitError, match=r"bytes besides the elements .* at most 65536"):
        read(made.SerializeToString())


WORDS = st.text(max_size=5)
SIZES = st.lists(st.integers(-1, 5), max_size=3)


@st.composite
def requests(draw: st.DrawFn) -> ModelInferRequest:
    made = ModelInferRequest(model_name=draw(WORDS), id=draw(WORDS))
    for name in draw(st.lists(WORDS, max_size=3)):
        made.parameters[name].int64_param = draw(st.integers(-(2**63), 2**63 - 1))
        made.outputs.add(name=name)
    for name in draw(st.lists(WORDS, max_size=3)):
        datatype = draw(st.sampled_from(["FP32", "FP64", "INT32", "BOOL", "BYTES"]))
        tensor = made.inputs.add(name=name, datatype=datatype, shape=draw(SIZES))
        floats = draw(st.lists(st.floats(width=32, allow_nan=False), max_size=70))
        match draw(st.integers(0, 4)):
            case 0:
                tensor.contents.fp32_contents.extend(floats)
            case 1:
                tensor.contents.fp64_contents.extend(floats * 4)
            case 2:
                tensor.contents.int_contents.extend(range(-30, draw(st.integers(-30, 30))))
            case 3:
                tensor.contents.fp32_contents.extend(floats)
                tensor.contents.bool_contents.extend([True] * 5)
    made.raw_input_contents.extend(draw(st.lists(st.binary(max_size=20), max_size=3)))
    return made


def outcome(tensors: Any, raw: Any, floats: Any) -> Any:
    try:
        decoded = decode_tensors(tensors, raw, floats)
    except TensorError as error:
        return str(error)
    return {name: (array.dtype, array.tolist()) for name, array in decoded.items()}


@pytest.fixture(scope="module", autouse=True)
def looked_into() -> Any:
    """Short messages are looked into as long ones are: examples may be small."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(request_bytes, "SMALL_BYTES", 0)
        patched.setattr(request_bytes, "_SMALL_INPUT_BYTES", 0)
        yield


@settings(deadline=None)
@given(requests())
def test_requests_are_read_as_protobuf_reads_them(made: ModelInferRequest) -> None:
    message = read(made.SerializeToString())
    assert outcome(message.head.inputs, message.raw_contents, message.floats) == outcome(
        made.inputs, made.raw_input_contents, {}
    )
    head = ModelInferRequest()
    head.CopyFrom(message.head)
    head.raw_input_contents.extend(map(bytes, message.raw_contents))
    for index, floats in message.floats.items():
        elements = np.frombuffer(floats.elements, "<f4" if floats.field[2] == "3" else "<f8")
        getattr(head.inputs[index].contents, floats.field).extend(elements.tolist())
    assert head == made


@settings(deadline=None, max_examples=500)
@given(st.data())
def test_damaged_requests_are_read_as_protobuf_reads_them_or_refused(data: st.DataObject) -> None:
    raw = bytearray(data.draw(requests()).SerializeToString())
    for at in data.draw(st.lists(st.integers(0, max(len(raw) - 1, 0)), min_size=1, max_size=3)):
        if raw:
            raw[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(MessageError):
        message = read(bytes(raw))
        expected = ModelInferRequest.FromString(bytes(raw))  # raises nothing, as ours did not
        assert outcome(message.head.inputs, message.raw_contents, message.floats) == outcome(
            expected.inputs, expected.raw_input_contents, {}
        )


@given(st.binary(max_size=64))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with contextlib.suppress(MessageError, DecodeError):
        ModelInferRequest.FromString(data)
        message = read(data)
        assert message.head.model_name == ModelInferRequest.FromString(data).model_name
