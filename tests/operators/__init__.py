"""A library with an operator of its own, compiled here, and models that use it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import onnx
import pytest
from onnx import helper

from tests.models import Builder

DOMAIN = "tests.offramp"
"""Domain of the operator ``Squash``: y = x / (1 + |x|)."""
_SOURCE = Path(__file__).parent / "squash.c"


def build_library(folder: Path, *, name: str = "squash.so", version: int = 1) -> Path:
    """Compile the library; of another ``version`` it is another file that does the same.

    Skips the test where there is no C compiler.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler, cc, to build a library of operators with")
    path = folder / name
    flags = ["-std=c99", "-O1", "-shared", "-fPIC", f"-DRELEASE={version}"]
    subprocess.run([compiler, *flags, "-o", path, _SOURCE, "-lm"], check=True)
    return path


def squash_mlp(*, layers: int = 4, width: int = 16, batch: int | str = "batch") -> onnx.ModelProto:
    """Residual blocks of the operator. Nothing is stated of any shape inside."""
    b = Builder()
    x = b.input("x", [batch, width])
    for i in range(layers):
        inner = b.node("Squash", b.linear(x, width, width), domain=DOMAIN)
        x = b.node("Add", x, b.linear(inner, width, width), out=f"block{i}")
    b.linear(x, width, 8, out="logits")
    b.output("logits", [batch, 8])
    return with_domain(b.build())


def squash_tokens() -> onnx.ModelProto:
    """Tokens squashed as heads [batch, heads, tokens, width], and joined again by a ``Reshape``."""
    b = Builder()
    x = b.input("x", ["batch", "tokens", 16])
    for i in range(3):
        heads = b.node("Reshape", x, b.constant([0, 0, 4, 4], "int64"))
        heads = b.node("Transpose", heads, perm=[0, 2, 1, 3])
        heads = b.node("Squash", heads, domain=DOMAIN, out=f"squashed{i}")
        joined = b.node("Transpose", heads, perm=[0, 2, 1, 3])
        joined = b.node("Reshape", joined, b.constant([0, 0, 16], "int64"))
        x = b.node("Add", x, b.matmul(joined, 16, 16), out=f"block{i}")
    pooled = b.node("ReduceMean", x, axes=[1], keepdims=0)
    b.linear(pooled, 16, 4, out="logits")
    b.output("logits", ["batch", 4])
    return with_domain(b.build())


def with_domain(model: onnx.ModelProto, version: int = 1) -> onnx.ModelProto:
    """Add the operator's domain to a model."""
    model.opset_import.append(helper.make_opsetid(DOMAIN, version))
    return model
