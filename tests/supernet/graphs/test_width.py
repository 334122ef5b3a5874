"""Channels that there are less of, through operators of many kinds, against modules of torch."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from tests.supernet.elastic_torch import (
    SPECS,
    ElasticBert,
    answers,
    by_hand,
    exported,
    inputs_for,
    one_thread,
    shaken,
    sliced_from,
)
from tests.supernet.graphs.made import a_model
from tests.torch_graphs import difference, in_runtime
from torch import Tensor, nn
from torch.nn import functional as fn

from offramp.compiler.frontend.model import read_model
from offramp.compiler.graphs.shapes import annotate
from offramp.compiler.graphs.source_model import SourceModel
from offramp.supernet.graphs import Supernet, laid_out
from offramp.supernet.graphs.extract import extract_subnet
from offramp.supernet.graphs.spec_file import parse_spec

ROUNDING = 1e-5


class Excited(nn.Module):
    """Squeeze-and-excitation over the inner channels, of a depthwise block."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.a, self.dw = nn.Conv2d(4, c, 1), nn.Conv2d(c, c, 3, padding=1, groups=c)
        self.squeeze, self.excite = nn.Conv2d(c, 3, 1), nn.Conv2d(3, c, 1)
        self.b = nn.Conv2d(c, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = fn.hardswish(self.dw(fn.hardswish(self.a(x))))
        s = self.excite(torch.relu(self.squeeze(fn.adaptive_avg_pool2d(y, 1))))
        return (x + self.b(y * fn.hardsigmoid(s))).mean((2, 3))


class Stream(nn.Module):
    """The width of the residual stream itself is elastic, as MobileNet's width multiplier is."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.stem, self.a = nn.Conv2d(3, c, 3), nn.Conv2d(c, 6, 1)
        self.b, self.gain = nn.Conv2d(6, c, 1), nn.Parameter(torch.ones(c, 1, 1))
        self.head = nn.Linear(c * 2 * 2, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = fn.max_pool2d(self.stem(x), 3, 2)
        y = y + self.gain * self.b(torch.tanh(self.a(y)))
        return self.head(fn.pad(y, (0, 1, 0, 1))[:, :, :2, :2].flatten(1))


class Grouped(nn.Module):
    """ResNeXt's groups of two channels, up and down again."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.a, self.g = nn.Conv2d(3, c, 1), nn.Conv2d(c, 2 * c, 3, groups=c // 2)
        self.up, self.norm = nn.ConvTranspose2d(2 * c, 4, 2), nn.InstanceNorm2d(2 * c, affine=True)
        self.out = nn.Conv2d(4, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = fn.leaky_relu(self.norm(self.g(fn.elu(self.a(x)))))
        y = fn.interpolate(y, scale_factor=2.0)
        return self.out(self.up(y)).amax((2, 3))


class Fused(nn.Module):
    """Queries, keys and values of one weight, as in timm's vision transformers."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.heads = c // 2
        self.qkv, self.out = nn.Linear(4, 3 * c), nn.Linear(c, 4)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, 2).permute(2, 0, 3, 1, 4).unbind(0)
        y = torch.softmax(q @ k.transpose(-2, -1), -1) @ v
        return self.out(y.transpose(1, 2).reshape(b, n, self.heads * 2))


class Gated(nn.Module):
    """Two halves of one weight, of which one gates the other; then a plain matrix."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.both, self.out = nn.Linear(4, 2 * c), nn.Linear(c, 3)
        self.slope = nn.PReLU(c)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.both(x).chunk(2, -1)
        y = self.slope((torch.sigmoid(gate) * value).transpose(1, 2)).transpose(1, 2)
        return self.out(y.clamp(-2, 2)).square()


CASES: dict[str, tuple[Callable[[int], nn.Module], tuple[int, ...], list[str], int]] = {
    "excited": (Excited, (4, 5, 5), ["/a/Conv", "/excite/Conv"], 1),
    # depthwise convolutions follow, and may be named all the same
    "excited, all named": (Excited, (4, 5, 5), ["/a/Conv", "/dw/Conv", "/excite/Conv"], 1),
    "stream": (Stream, (3, 7, 7), ["/stem/Conv", "/b/Conv"], 1),
    "grouped": (Grouped, (3, 5, 5), ["/a/Conv"], 1),
    "fused": (Fused, (5, 4), ["/qkv/MatMul"], 3),
    "gated": (Gated, (5, 4), ["/both/MatMul"], 2),
}
WIDTH = 8


def read(module: nn.Module, x: NDArray[Any], folder: Path, **options: Any) -> SourceModel:
    buffer = io.BytesIO()
    with warnings.catch_warnings(), one_thread():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module, (torch.from_numpy(x),), buffer, dynamo=False, input_names=["x"],
            output_names=["y"], dynamic_axes={"x": {0: "batch"}, "y": {0: "batch"}},
            do_constant_folding=options.get("simplify", True),
        )  # fmt: skip
    path = folder / "model.onnx"
    path.write_bytes(buffer.getvalue())
    return read_model(path, **options)


def first_of_parts(full: nn.Module, small: nn.Module, parts: int) -> nn.Module:
    """Copy weights as ``sliced_from``, with the first rows of each of several equal parts."""
    sliced_from(full, small)
    state = full.state_dict()
    with torch.no_grad():
        for name, tensor in small.state_dict().items():
            if len(tensor) < len(state[name]) and parts > 1 and len(tensor) % parts == 0:
                whole = state[name].unflatten(0, (parts, -1))
                if name.startswith(("qkv", "both")):
                    tensor.copy_(whole[:, : len(tensor) // parts].flatten(0, 1))
    return small.eval()


@pytest.mark.parametrize(
    ("case", "simplify"),
    [
        (case, simplify)
        for case in CASES
        for simplify in (True, False)
        if simplify or case != "gated"
    ],
)
def test_operators_pass_on_fewer_channels(case: str, simplify: bool, tmp_path: Path) -> None:
    """Unsimplified graphs transpose weights and compute shapes as they run."""
    make, shape, weights, parts = CASES[case]
    full = shaken(make(WIDTH))
    x = np.random.default_rng(0).standard_normal((3, *shape)).astype(np.float32)
    source = read(full, x, tmp_path, simplify=simplify)
    group = {"weights": weights, "parts": parts, "ratios": [0.25, 0.5, 0.75]}
    net = Supernet.of(source, parse_spec({"width": [group]}, "s.toml"))
    for made in (net, laid_out(net)):
        for choice in net.spec.choices():
            small = first_of_parts(full, make(int(WIDTH * choice.ratios[0])), parts)
            with torch.no_grad(), one_thread():
                wanted = small(torch.from_numpy(x)).numpy()
            found = in_runtime(extract_subnet(made, choice).proto, {"x": x})
            assert difference(found, {"y": wanted}) < ROUNDING, choice


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("simplify", [True, False])
def test_lengths_may_be_free(fused: bool, simplify: bool, tmp_path: Path) -> None:
    """Then shapes are computed at run time, and inputs of reshapes are corrected there."""
    kind = "fused" if fused else "bert"
    full = shaken(ElasticBert(fused=fused))
    path = tmp_path / "bert.onnx"
    onnx.save(exported(full, free_length=True), path)
    source = read_model(path, simplify=simplify)
    net = Supernet.of(source, parse_spec(SPECS[kind], "s.toml"))
    for made in (net, laid_out(net)):
        for choice in net.spec.choices()[::4]:
            proto = extract_subnet(made, choice).proto
            for tokens in (7, 4):
                inputs = {name: a[:, :tokens] for name, a in inputs_for(full, 3).items()}
                wanted = answers(by_hand(kind, full, choice), inputs)
                assert difference(in_runtime(proto, inputs), {"scores": wanted}) < ROUNDING


class Torchs(nn.Module):
    """Torch's own attention: one weight for three, and heads that are merged with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 4, 16, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(1))


def test_heads_that_torch_merges_with_the_batch(tmp_path: Path) -> None:
    full = shaken(Torchs())
    x = np.random.default_rng(0).standard_normal((3, 6, 8)).astype(np.float32)
    group = {"weights": ["/layer/self_attn/MatMul"], "parts": 3, "ratios": [0.25, 0.5]}
    net = Supernet.of(read(full, x, tmp_path), parse_spec({"width": [group]}, "s.toml"))
    for choice in net.spec.choices():
        without = copy.deepcopy(full)
        assert isinstance(without, Torchs)
        with torch.no_grad(), one_thread():  # a head that the output ignores is as good as none
            without.layer.self_attn.out_proj.weight[:, int(8 * choice.ratios[0]) :] = 0
            wanted = without(torch.from_numpy(x)).numpy()
        for made in (net, laid_out(net)):
            found = in_runtime(extract_subnet(made, choice).proto, {"x": x})
            assert difference(found, {"y": wanted}) < ROUNDING


@pytest.mark.parametrize("layout", [False, True])
def test_products_with_the_constant_in_front_and_gemms(layout: bool) -> None:
    """W @ x has its output channels in the rows of W; Gemm reads weights either way."""
    rng = np.random.default_rng(0)
    weights = {
        "w": rng.standard_normal((8, 4)).astype(np.float32),
        "flat": np.array([-1, 8 * 3], np.int64),
        "g": rng.standard_normal((24, 6)).astype(np.float32),
        "b": rng.standard_normal((1, 6)).astype(np.float32),
        "h": rng.standard_normal((5, 6)).astype(np.float32),
    }
    nodes = [
        helper.make_node("MatMul", ["w", "x"], ["a"], name="front"),
        helper.make_node("Reshape", ["a", "flat"], ["f"], name="flatten"),
        helper.make_node("Gemm", ["f", "g", "b"], ["c"], name="gemm"),
        helper.make_node("Gemm", ["c", "h"], ["y"], name="last", transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "products",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 5])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    annotate(proto)
    content = {
        "width": [
            {"weights": ["front"], "ratios": [0.25, 0.5]},
            {"weights": ["gemm"], "axis": 1, "ratios": [0.5]},
        ]
    }
    net = Supernet.of(a_model(proto), parse_spec(content, "s.toml"))
    net = laid_out(net) if layout else net
    x = rng.standard_normal((2, 4, 3)).astype(np.float32)
    for choice in net.spec.choices():
        k, n = int(8 * choice.ratios[0]), int(6 * choice.ratios[1])
        hidden = (weights["w"][:k] @ x).reshape(2, -1) @ weights["g"][: 3 * k, :n]
        wanted = (hidden + weights["b"][:, :n]) @ weights["h"][:, :n].T
        subnet = extract_subnet(net, choice)
        assert difference(in_runtime(subnet.proto, {"x": x}), {"y": wanted}) < ROUNDING
        if layout and choice.ratios[0] == 1.0:
            kinds = {name: origin.kind for name, origin in subnet.origins.items()}
            assert kinds["h"] == ("whole" if n == 6 else "prefix")
            assert kinds["g"] == ("whole" if n == 6 else "own")  # elastic on both sides
