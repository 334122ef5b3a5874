"""Messages arrive as they were sent; what is malformed is refused, and nothing crashes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.facts import Told, facts

from offramp.cluster.remote.worker_messages import (
    GIVEN,
    HEAD,
    INLINE,
    MOST_BODY,
    MOST_HEADER,
    Failed,
    FrameError,
    Hello,
    JoinSlot,
    Message,
    OpenSlot,
    Ping,
    PlacedArray,
    Prepare,
    Ready,
    Refused,
    Release,
    RunStage,
    Shutdown,
    StageDone,
    TensorForm,
    array_in,
    decode,
    encode,
    inline_offsets,
    pack_head,
    unpack_head,
)

FLOATS = np.dtype(np.float32)
INPUT = PlacedArray(TensorForm("x/ü\udc80", FLOATS, (3, 0, 5)), 640)
ANSWER = PlacedArray(TensorForm("", np.dtype(np.int64), (3, 2)), INLINE)
CONFIDENCE = PlacedArray(TensorForm("", FLOATS, (3,)), INLINE)
PASSED = PlacedArray(TensorForm("mask", np.dtype(np.bool_), (3, 7)), GIVEN)
RUN = RunStage(7, 3, 0.25, (64, 1 << 40), (INPUT, PASSED._replace(place=0)))
MESSAGES: list[Message] = [
    Hello(version="1", backend="onnxruntime", threads=2),
    Prepare(stage=3, document='{"named": {"path": "\udcff"}}'),
    Release(stage=3),
    OpenSlot(slot=1, size_bytes=1 << 20),
    JoinSlot(session="5e55", slot=3),
    Ping(),
    Shutdown(),
    Ready(pid=42, cpu_s=1.5),
    Refused(reason="no such backend"),
    Failed(message='stage 2 failed on 3 rows: "…"\n\x1b\\'),
    RUN,
    RUN._replace(threshold=None, arrays=()),
    StageDone(ANSWER, CONFIDENCE, (PASSED, INPUT)),
    StageDone(None, CONFIDENCE, ()),
    StageDone(ANSWER, CONFIDENCE, None),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_arrive_as_they_were_sent(message: Message) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_what_is_cut_off_or_goes_on_is_refused(message: Message) -> None:
    header = encode(message)
    for cut in range(len(header)):
        with pytest.raises(FrameError):
            decode(header[:cut])
    with pytest.raises(FrameError):
        decode(header + b"\0")


@given(st.binary(max_size=80), st.sampled_from(MESSAGES), st.integers(0, 200))
def test_any_bytes_are_a_message_or_refused(noise: bytes, message: Message, where: int) -> None:
    header = encode(message)
    for case in (noise, header[:where] + noise + header[where + len(noise) :]):
        try:
            decode(case)
        except FrameError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("head", "told"),
    [
        (HEAD.pack(b"GET ", 10, 0), ("b'GET '", "b'EEW1'")),
        (HEAD.pack(b"EEW1", 0, 0), ("0 and 0 bytes", "1 to")),
        (HEAD.pack(b"EEW1", MOST_HEADER + 1, 0), (f"has {MOST_HEADER + 1} and 0",)),
        (HEAD.pack(b"EEW1", 1, MOST_BODY + 1), (f"at most {MOST_BODY}; send smaller batches",)),
    ],
)
def test_the_head_of_a_frame_is_bounded(head: bytes, told: Told) -> None:
    with pytest.raises(FrameError, match=facts(*told)):
        unpack_head(head)
    assert unpack_head(pack_head(b"abc", 5)) == (3, 5)


@pytest.mark.parametrize(
    ("arrays", "told"),
    [
        ((INPUT, INPUT), ("two arrays", "same name")),
        ((INPUT._replace(place=-3),), ("33 bytes at -3",)),
        ((PlacedArray(TensorForm("x", FLOATS, (0, 1 << 40, 1 << 40)), 0),), ("[0, 1099511627776",)),
        ((PlacedArray(TensorForm("x", FLOATS, (2, -1)), 0),), ("[2, -1]",)),
    ],
)
def test_arrays_that_cannot_be_are_refused(arrays: tuple[PlacedArray, ...], told: Told) -> None:
    with pytest.raises(FrameError, match=facts(*told)):
        decode(encode(RUN._replace(arrays=arrays)))


def test_tensors_of_other_dtypes_are_refused_before_they_are_sent() -> None:
    text = PlacedArray(TensorForm("name", np.dtype("U5"), (1,)), INLINE)
    with pytest.raises(FrameError, match=r"'name' of dtype <U5 .* serve without workers"):
        encode(RUN._replace(arrays=(text,)))


def test_inline_arrays_are_all_of_the_body_and_aligned() -> None:
    arrays = (ANSWER, INPUT, CONFIDENCE)
    assert inline_offsets(arrays, 64 + 12) == [0, -1, 64]
    with pytest.raises(FrameError, match=facts("77 bytes", "76")):
        inline_offsets(arrays, 77)
    body = bytearray(64) + np.array([1, 2, 3], np.float32).tobytes()
    assert array_in(body, CONFIDENCE.form, 64).tolist() == [1, 2, 3]
