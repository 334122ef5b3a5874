"""Tensors on the wire, in both forms, and everything that may be wrong with them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from tests.facts import Told, facts

from offramp.proto.messages import InferTensorContents, ModelInferRequest
from offramp.proto.tensors import (
    _CONTENTS_FIELDS,
    DATATYPES,
    TensorError,
    datatype_of,
    decode_tensors,
    dtype_of,
    encode_tensor,
)

Input = ModelInferRequest.InferInputTensor


def sample(datatype: str) -> np.ndarray[Any, Any]:
    dtype = DATATYPES[datatype]
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return np.array([[limits.min, 0, 1], [2, 3, limits.max]], dtype)
    if dtype == np.object_:
        return np.array([[b"", b"a", b"\xff\0"], [b"bc", b"a", b"x" * 300]], dtype)
    return np.array([[0, 1, 0], [1, 1, 0]], dtype) / (1 if dtype.kind == "b" else 3)


@pytest.fixture(params=sorted(DATATYPES))
def datatype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_names_go_there_and_back(datatype: str) -> None:
    assert datatype_of(dtype_of(datatype, "x"), "x") == datatype


def test_raw_contents_survive_every_dtype(datatype: str) -> None:
    array = sample(datatype).astype(DATATYPES[datatype])
    tensor = Input()
    raw = encode_tensor(tensor, "x", array)
    assert (tensor.name, tensor.datatype, list(tensor.shape)) == ("x", datatype, [2, 3])
    decoded = decode_tensors([tensor], [raw])["x"]
    assert decoded.dtype == array.dtype
    np.testing.assert_array_equal(decoded, array)


@pytest.mark.parametrize("datatype", sorted(_CONTENTS_FIELDS))
def test_typed_contents_survive_every_dtype(datatype: str) -> None:
    array = sample(datatype).astype(DATATYPES[datatype])
    contents = InferTensorContents(**{_CONTENTS_FIELDS[datatype]: array.ravel().tolist()})
    tensor = Input(name="x", datatype=datatype, shape=[2, 3], contents=contents)
    decoded = decode_tensors([tensor], [])["x"]
    assert decoded.dtype == array.dtype
    np.testing.assert_array_equal(decoded, array)


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (2, 1, 2)])
def test_shapes_survive(shape: tuple[int, ...]) -> None:
    array = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    tensor = Input()
    raw = encode_tensor(tensor, "x", array)
    for decoded in (
        decode_tensors([tensor], [raw])["x"],
        decode_tensors(
            [
                Input(
                    name="x",
                    datatype="FP32",
                    shape=shape,
                    contents=InferTensorContents(fp32_contents=array.ravel().tolist()),
                )
            ],
            [],
        )["x"],
    ):
        assert decoded.shape == shape
        np.testing.assert_array_equal(decoded, array)


def test_strided_and_big_endian_arrays_are_sent_row_by_row_and_little_endian() -> None:
    array = np.arange(6, dtype=">i4").reshape(2, 3).T
    tensor = Input()
    raw = encode_tensor(tensor, "x", array)
    assert raw == np.ascontiguousarray(array, dtype="<i4").tobytes()
    assert list(tensor.shape) == [3, 2]


def test_raw_contents_are_viewed_without_a_copy() -> None:
    raw = np.arange(4, dtype=np.float32).tobytes()
    decoded = decode_tensors([Input(name="x", datatype="FP32", shape=[4])], [raw])["x"]
    assert np.frombuffer(raw, np.uint8).ctypes.data == decoded.ctypes.data
    assert not decoded.flags.writeable


def x(datatype: str = "FP32", shape: tuple[int, ...] = (2,), **contents: Any) -> Any:
    filled = InferTensorContents(**contents) if contents else None
    return Input(name="x", datatype=datatype, shape=shape, contents=filled)


@pytest.mark.parametrize(
    ("tensors", "raw", "message"),
    [
        ([x()], [b"1234567"], ("'x'", "7 bytes", "FP32 [2]", "8")),
        ([x()], [b""], ("0 bytes", "FP32 [2]", "8")),
        ([x()], [b"12345678", b""], ("1 tensors", "2 raw contents")),
        ([x(), x()], [b"12345678"] * 2, ("'x'", "twice")),
        ([x(shape=(-1, 2))], [b"12345678"], ("has shape [-1, 2]",)),
        ([x("BF16")], [b"12345678"], ("datatype 'BF16', which is not served",)),
        (
            [x("BYTES", (2,))],
            [b"\1\0\0\0a\2\0\0\0b"],
            ("10 bytes of raw", "element 1 does not end"),
        ),
        ([x("BYTES", (1,))], [b"\1\0\0"], ("3 bytes of raw", "element 0 does not end")),
        ([x("BYTES", (1,))], [b"\1\0\0\0ab"], ("6 bytes of raw", "take 5")),
        ([x("BYTES", (4097,))], [b""], ("4097 strings", "at most 4096")),
        ([x("BF16")], [b"1234"], ("numpy has no bfloat16",)),
        ([x("fp32")], [b"12345678"], ("names are upper case",)),
        ([x("BOOL")], [b"\x01\x02"], ("BOOL with a byte of 2",)),
        ([x(fp32_contents=[1, 2])], [b"12345678"], ("typed and raw contents",)),
        ([x(fp32_contents=[1])], [], ("1 elements in fp32_contents", "shape [2]", "2")),
        ([x()], [], ("0 elements in fp32_contents", "shape [2]", "2")),
        ([x(fp64_contents=[1, 2])], [], ("fp64_contents", "fp32_contents")),
        ([x("FP16", fp32_contents=[1, 2])], [], ("typed contents", "raw")),
        ([x("INT8", int_contents=[1, 128])], [], ("element 128, which is outside of INT8",)),
        ([x("UINT16", uint_contents=[65536, 0])], [], ("65536, which is outside of UINT16",)),
    ],
)
def test_what_is_wrong_is_named(tensors: list[Any], raw: list[bytes], message: Told) -> None:
    with pytest.raises(TensorError, match=facts(*message)):
        decode_tensors(tensors, raw)


@pytest.mark.parametrize("array", [np.array(["a"]), np.array([1j])])
def test_dtypes_without_a_name_are_refused_when_sending(array: np.ndarray[Any, Any]) -> None:
    with pytest.raises(TensorError, match=r"tensor 'x' has numpy dtype .*convert it"):
        encode_tensor(Input(), "x", array)


def test_strings_are_sent_as_bytes() -> None:
    with pytest.raises(TensorError, match="tensor 'x' has the element 'a', expected bytes"):
        encode_tensor(Input(), "x", np.array([b"b", "a"], np.object_))
