"""Fixtures shared by the compiler's tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx
import pytest

from offramp.compiler.frontend.model import read_model
from offramp.compiler.graphs.source_model import SourceModel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., SourceModel]:
    """Write a model to disk and read it as a user's file is read."""

    def write_and_read(proto: onnx.ModelProto, **options: object) -> SourceModel:
        path = tmp_path / "model.onnx"
        onnx.save(proto, path)
        return read_model(path, **options)  # type: ignore[arg-type]

    return write_and_read
