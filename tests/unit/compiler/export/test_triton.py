"""The configuration for Triton, of tensors and types that the compiled examples do not have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from google.protobuf import text_format
from tests.exports import replayed_bundle
from tests.facts import facts

from offramp.bundle import Manifest, Profile, TensorSpec, UnreadInput
from offramp.bundle.schema.compilation import OperatorLibrary
from offramp.compiler.common.errors import ExportError
from offramp.compiler.export.model_folder import ServedFile, config_text, warmup_files
from offramp.compiler.export.repositories import check_model

PROFILE = Profile(
    device="cpu",
    threads=1,
    batch_sizes=(1, 4, 16),
    source_ms=(2.0, 5.0, 19.0),
    segments_ms=((2.0, 5.0, 19.0),),
    exits_ms=(),
    stages_ms=(),
)
"""2, 1.25 and 1.19 ms a sample."""


def served(**changes: Any) -> ServedFile:
    tokens = TensorSpec(name='odd "name"/x', dtype="int64", shape=("batch", "sequence"))
    age = TensorSpec(name="age", dtype="float16", shape=("batch",))
    file = ServedFile(
        name="m",
        inputs=(tokens, age),
        outputs=(TensorSpec(name="probabilities", dtype="float64", shape=("batch", 3)),),
        sample={
            tokens.name: np.arange(6, dtype=np.int64)[None],
            "age": np.ones(1, np.float16),
        },
        profile=PROFILE,
        metadata={},
        half_precision=False,
    )
    return replace(file, **changes)


def parsed(file: ServedFile) -> Any:
    return text_format.Parse(config_text(file).decode(), triton.model_config_pb2.ModelConfig())


def test_one_number_a_sample_is_reshaped() -> None:
    tokens, age = parsed(served()).input
    assert (tokens.name, list(tokens.dims)) == ('odd "name"/x', [-1])
    assert tokens.data_type == triton.model_config_pb2.TYPE_INT64
    assert not tokens.HasField("reshape")
    assert (list(age.dims), age.data_type) == ([1], triton.model_config_pb2.TYPE_FP16)
    assert age.HasField("reshape")
    assert list(age.reshape.shape) == []
    (output,) = parsed(served()).output
    assert output.data_type == triton.model_config_pb2.TYPE_FP64


def test_sizes_and_delay_follow_from_the_profile() -> None:
    config = parsed(served())
    assert config.max_batch_size == 16
    assert list(config.dynamic_batching.preferred_batch_size) == [4, 16]
    assert config.dynamic_batching.max_queue_delay_microseconds == 200


def test_warm_up_has_a_file_for_each_input() -> None:
    file = served()
    files = warmup_files(file)
    assert files["warmup/input_0"] == np.arange(6, dtype="<i8").tobytes()
    assert files["warmup/input_1"] == np.ones(1, "<f2").tobytes()
    one, many = parsed(file).model_warmup
    assert (one.batch_size, many.batch_size) == (1, 16)
    for warmup in (one, many):
        assert list(warmup.inputs['odd "name"/x'].dims) == [6]
        assert list(warmup.inputs["age"].dims) == [1]
        assert warmup.inputs["age"].input_data_file == "input_1"


def test_half_precision_is_not_optimised_fully() -> None:
    assert not parsed(served()).HasField("optimization")
    assert parsed(served(half_precision=True)).optimization.graph.level == 1


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return replayed_bundle("mlp", tmp_path_factory.mktemp("m"), exits_after=(0,)).manifest


def unread(name: str, shape: tuple[int | str, ...]) -> UnreadInput:
    return UnreadInput(spec=TensorSpec(name=name, dtype="float32", shape=shape), place=0)


def test_inputs_without_a_batch_are_refused(manifest: Manifest) -> None:
    check_model(replace(manifest, unread=(unread("types", ("batch", 16)),)), Path("m.ee"))
    for shape in ((), (4,)):
        said = r"m\.ee: input scale: float32 \[.*\] is not read and has no batch dimension, .*;"
        with pytest.raises(ExportError, match=said + " remove it from"):
            check_model(replace(manifest, unread=(unread("scale", shape),)), Path("m.ee"))


def test_operators_of_a_library_are_refused(manifest: Manifest) -> None:
    library = OperatorLibrary(file="ops.so", sha256="0" * 64, operators=("my:Norm",))
    with pytest.raises(ExportError, match=facts("ops.so", "--output")):
        check_model(replace(manifest, custom_ops=(library,)), Path("m.ee"))
