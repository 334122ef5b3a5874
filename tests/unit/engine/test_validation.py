"""Tensors are checked against the model, in words that say what to do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.facts import Told, tells

from offramp.bundle import TensorSpec
from offramp.engine.common.validation import check_request, check_tensors

IDS = TensorSpec(name="input_ids", dtype="int64", shape=("batch", "sequence"))
MASK = TensorSpec(name="attention_mask", dtype="int64", shape=("batch", "sequence"))
FLOATS = TensorSpec(name="x", dtype="float32", shape=("batch", 4))
IMAGE = TensorSpec(name="image", dtype="uint8", shape=("batch", 1, 28, 28))


def tokens(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int64)


def image(*shape: int, dtype: str = "uint8") -> np.ndarray:
    return np.zeros(shape, dtype)


@given(st.integers(1, 40), st.integers(1, 40))
def test_what_fits_has_nothing_wrong(batch: int, sequence: int) -> None:
    ids = tokens(batch, sequence)
    assert check_tensors([IDS, MASK], {"attention_mask": ids, "input_ids": ids}) is None
    assert check_tensors([IMAGE], {"image": image(batch, 1, 28, 28)}) is None


@pytest.mark.parametrize(
    ("specs", "tensors", "message"),
    [
        ([IMAGE], {}, ("'image' is missing", "image: uint8 [batch, 1, 28, 28]")),
        (
            [IMAGE],
            {"imgae": image(1, 1, 28, 28)},
            ("'imgae'", "'image'", "image: uint8 [batch, 1, 28, 28]"),
        ),
        (
            [IMAGE],
            {"image": image(1, 1, 28, 28), "x": image(1)},
            ("'x'", "image: uint8 [batch, 1, 28, 28]"),
        ),
        (
            [IDS, MASK],
            {"input_ids": tokens(2, 5)},
            (
                "'attention_mask' is missing",
                "input_ids: int64 [batch, sequence]; attention_mask: int64 [batch, sequence]",
            ),
        ),
        (
            [IMAGE],
            {"image": image(2, 1, 28, 28, dtype="float32")},
            (
                "'image' is float32 [2, 1, 28, 28]",
                "image: uint8 [batch, 1, 28, 28]",
                ".astype('uint8')",
            ),
        ),
        (
            [IMAGE],
            {"image": image(1, 28, 28)},
            ("'image' is uint8 [1, 28, 28]", "image: uint8 [batch, 1, 28, 28]", "array[None]"),
        ),
        (
            [IMAGE],
            {"image": image(2, 28, 28)},
            ("'image' is uint8 [2, 28, 28]", "add the channel with array[:, None]"),
        ),
        (
            [TensorSpec(name="x", dtype="uint8", shape=("batch", "time", 1))],
            {"x": image(2, 5)},
            ("'x' is uint8 [2, 5]", "add dimension 2 with array[:, :, None]"),
        ),
        (
            [TensorSpec(name="x", dtype="uint8", shape=("batch", 3, 1, 7))],
            {"x": image(2, 3, 7)},
            ("'x' is uint8 [2, 3, 7]", "add dimension 2 with array[:, :, None]"),
        ),
        (
            [IMAGE],
            {"image": image(28, 28)},
            ("'image' is uint8 [28, 28]", "image: uint8 [batch, 1, 28, 28]"),
        ),
        (
            [IMAGE],
            {"image": np.uint8(3)[...]},
            ("'image' is uint8 []", "image: uint8 [batch, 1, 28, 28]"),
        ),
        (
            [IMAGE],
            {"image": image(2, 1, 28, 27)},
            (
                "'image' is uint8 [2, 1, 28, 27]",
                "27 of dimension 3",
                "28",
                "image: uint8 [batch, 1, 28, 28]",
            ),
        ),
        (
            [IMAGE],
            {"image": image(2, 28, 28, 1)},
            (
                "'image' is uint8 [2, 28, 28, 1]",
                "28 of dimension 1",
                "1;",
                "image: uint8 [batch, 1, 28, 28]",
                "[batch, height, width, channels]",
                ".transpose(0, 3, 1, 2)",
            ),
        ),
        (
            [FLOATS],
            {"x": image(2, 4)},
            ("'x' is uint8 [2, 4]", "x: float32 [batch, 4]", ".astype('float32')", "scale"),
        ),
        (
            [IMAGE],
            {"image": image(0, 1, 28, 28)},
            ("'image' is uint8 [0, 1, 28, 28]", "dimension 0 (batch) is empty"),
        ),
        (
            [IDS],
            {"input_ids": tokens(2, 0)},
            ("'input_ids' is int64 [2, 0]", "dimension 1 (sequence) is empty"),
        ),
        (
            [IDS, MASK],
            {"input_ids": tokens(2, 5), "attention_mask": tokens(2, 6)},
            ("sequence is 5", "'input_ids'", "6 in 'attention_mask'", "the same"),
        ),
        (
            [IDS, IMAGE],
            {"image": image(3, 1, 28, 28), "input_ids": tokens(2, 5)},
            ("batch is 2", "'input_ids'", "3 in 'image'", "the same"),
        ),
    ],
)
def test_what_does_not_fit_is_told(specs, tensors, message: Told) -> None:
    tells(check_tensors(specs, tensors), *message)


def test_a_remedy_that_would_not_fit_is_not_named() -> None:
    for shape in ((2, 28, 27), (1, 28, 27), (0, 28, 28), (28, 28)):
        wrong = check_tensors([IMAGE], {"image": image(*shape)})
        assert wrong is not None
        assert "None" not in wrong
    other = TensorSpec(name="other", dtype="uint8", shape=("batch",))
    wrong = check_tensors([other, IMAGE], {"other": image(3), "image": image(1, 28, 28)})
    assert wrong is not None
    assert wrong.endswith(f"expected {IMAGE.describe()}")


def test_a_data_set_is_no_single_sample() -> None:
    one = {"image": image(1, 28, 28)}
    tells(check_tensors([IMAGE], one, batched=True), "add the channel with array[:, None]")
    assert check_tensors([FLOATS], {"x": np.ones(4, np.float32)}, batched=True) == (
        f"input 'x' is float32 [4], expected {FLOATS.describe()}"
    )


def test_a_symbol_binds_within_one_tensor_too() -> None:
    square = TensorSpec(name="x", dtype="float32", shape=("batch", "side", "side"))
    assert check_tensors([square], {"x": np.zeros((1, 4, 4), np.float32)}) is None
    wrong = check_tensors([square], {"x": np.zeros((1, 4, 5), np.float32)})
    tells(wrong, "side is 4", "'x'", "5 in 'x'", "the same")


def test_the_other_byte_order_is_another_type() -> None:
    wrong = check_tensors([IDS], {"input_ids": tokens(1, 2).astype(">i8")})
    assert wrong is not None
    assert wrong.endswith("convert it with .astype('int64')")


def test_views_and_read_only_arrays_are_fine() -> None:
    wide = tokens(6, 8)[::2, ::2]
    wide.setflags(write=False)
    assert check_tensors([IDS], {"input_ids": wide}) is None


def test_a_priority_has_32_bits() -> None:
    def wrong(priority: int) -> str | None:
        return check_request(
            [IDS], {"input_ids": tokens(1, 2)}, deadline_s=None, priority=priority, max_samples=1
        )

    assert [wrong(priority) for priority in (-(2**31), 0, 2**31 - 1)] == [None] * 3
    tells(wrong(-(2**31) - 1), "priority -2147483649", "32-bit")
    tells(wrong(2**31), "priority 2147483648", "32-bit")
