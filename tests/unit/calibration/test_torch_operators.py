"""Operators in torch compute what ONNX says, and what ONNX Runtime does.

ONNX's own cases are made by its package: a model with a node each, inputs, and outputs in numpy.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from tests.torch_graphs import difference, in_runtime, in_torch
from torch import Tensor

from offramp.calibration.data.errors import UntrainableError
from offramp.calibration.torch.torch_graph import OPERATORS, TorchGraph
from offramp.compiler.frontend.preparation import MIN_OPSET
from offramp.compiler.graphs.graph import default_opset

TOLERANCES = {"float16": 1e-3, "bfloat16": 2e-2}
"""A few steps of half precision, in which ONNX computes otherwise than torch."""
DROPS = {
    "test_training_dropout_default",
    "test_training_dropout_default_mask",
    "test_training_dropout",
    "test_training_dropout_mask",
}
"""Cases that drop something, which we do not."""
MENDED = {"test_averagepool_3d_dilations_large_count_include_pad_is_1_ceil_mode_is_True"}
"""Cases whose outputs are wrong in onnx 1.17, and right today."""
EXPANDED = "functions"
FOUR_DIGITS = {"AveragePool", "GridSample"}
"""Kinds some of whose cases have outputs written down by hand."""
ELSEWHERE = {"And", "Cast", "CastLike", "GRU", "Not", "Or", "Xor"}
"""Kinds without a case that torch and our opsets have; ONNX Runtime is asked below."""
KNOWN = {np.dtype(name) for name in ["bool", "int8", "int16", "int32", "int64", "uint8"]} | {
    np.dtype(name) for name in ("float16", "float32", "float64")
}


@pytest.fixture(scope="module")
def cases() -> dict[str, list[Any]]:
    """ONNX's cases by kind; those of several nodes, which functions are expanded to, as such.

    Cases of opsets that models are converted from, as some of older packages are, are left out.
    """
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of divisions by zero, which are meant
        collected = collect_testcases(None)
    found: dict[str, list[Any]] = {}
    for case in collected:
        if case.name in DROPS | MENDED or case.model is None:
            continue
        if default_opset(case.model) >= MIN_OPSET:
            nodes = case.model.graph.node
            found.setdefault(nodes[0].op_type if len(nodes) == 1 else EXPANDED, []).append(case)
    return found


def to_tensor(array: Any) -> Tensor | None:
    """``None`` for what torch has nothing for."""
    array = np.asarray(array)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.array(array)) if array.dtype in KNOWN else None


def compared(case: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name, found and wanted of each output; nothing where the case has types that we have not."""
    try:
        graph = TorchGraph(case.model)
    except UntrainableError:
        return
    for given, outputs in case.data_sets:
        inputs = [to_tensor(array) for array in given]
        wanted = [to_tensor(array) for array in outputs]
        if any(t is None for t in (*inputs, *wanted)):
            continue
        names = [i.name for i in case.model.graph.input]
        found = graph(dict(zip(names, inputs, strict=False)))
        for output, right in zip(case.model.graph.output, wanted, strict=False):
            yield output.name, found[output.name], right


@pytest.mark.parametrize("kind", [*sorted(OPERATORS.keys() - ELSEWHERE), EXPANDED])
def test_an_operator_computes_what_the_cases_of_onnx_say(
    kind: str, cases: dict[str, list[Any]]
) -> None:
    if kind not in cases:
        pytest.skip(f"this version of the onnx package has no case of {kind}")
    count = 0
    for case in cases[kind]:
        for name, found, wanted in compared(case):
            assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), (case.name, name)
            halves = str(wanted.dtype).removeprefix("torch.")
            tolerance = TOLERANCES.get(halves, 1e-3 if kind in FOUR_DIGITS else 1e-5)
            np.testing.assert_allclose(
                found.detach().double(),
                wanted.double(),
                rtol=tolerance,
                atol=tolerance if halves in TOLERANCES else tolerance / 10,
                err_msg=case.name,
            )
            count += 1
    assert count >= 1


def graph_of(
    kind: str,
    inputs: dict[str, NDArray[Any]],
    opset: int,
    constants: dict[str, NDArray[Any]] | None = None,
    outputs: int = 1,
    **attributes: Any,
) -> onnx.ModelProto:
    """Return a node on some inputs; constants are initialisers, in order after them."""
    constants = constants or {}
    given = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for n, a in inputs.items()
    ]
    made = [f"y{i}" for i in range(outputs)]
    node = helper.make_node(kind, [*inputs, *constants], made, **attributes)
    graph = helper.make_graph(
        [node],
        "one",
        given,
        [onnx.ValueInfoProto(name=name) for name in made],
        initializer=[numpy_helper.from_array(a, n) for n, a in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def normal(*sizes: int) -> NDArray[np.float32]:
    return np.random.default_rng(0).standard_normal(sizes).astype(np.float32)


def ints(*values: int) -> NDArray[np.int64]:
    return np.array(values, np.int64)


FORMS = {
    "ReduceMean": ("ReduceMean", 17, {"axes": [1, 2]}, {}),
    "ReduceL2 of all": ("ReduceL2", 13, {}, {}),
    "Cast": ("Cast", 13, {"to": TensorProto.INT32}, {}),
    "Cast to half": ("Cast", 13, {"to": TensorProto.FLOAT16}, {}),
    "Cast to truth values": ("Cast", 13, {"to": TensorProto.BOOL}, {}),
    "CastLike": ("CastLike", 15, {}, {"like": np.array(1, np.float64)}),
    "Gather a scalar": ("Gather", 13, {"axis": 1}, {"i": np.array(-1)}),
    "Flatten": ("Flatten", 13, {"axis": -1}, {}),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_without_a_case_compute_what_onnx_runtime_does(name: str) -> None:
    kind, opset, attributes, constants = FORMS[name]
    x = {"x": normal(1, 3, 4, 5)}
    model = graph_of(kind, x, opset, constants, **attributes)

    assert difference(in_torch(TorchGraph(model), x), in_runtime(model, x)) <= 1e-6


def padded_windows() -> Iterator[dict[str, Any]]:
    for kernel, stride, dilation in itertools.product((2, 3), (1, 2, 3), (1, 2)):
        common = {"kernel_shape": [kernel] * 2, "strides": [stride, 1], "dilations": [dilation] * 2}
        for pads in ([0, 0, 0, 0], [1, 0, 0, 1], [1, 1, 1, 1]):
            yield {**common, "pads": pads}
        for how in ("SAME_UPPER", "SAME_LOWER", "VALID"):
            if dilation == 1 and stride <= kernel:  # ONNX Runtime refuses others
                yield {**common, "auto_pad": how}


@pytest.mark.parametrize("kind", ["And", "Not", "Or", "Xor"])
def test_truth_values_are_joined_as_in_onnx_runtime(kind: str) -> None:
    x = {"x": np.array([True, False])}
    y = {} if kind == "Not" else {"y": np.array([[True, True], [False, False]])}
    model = graph_of(kind, x, 13, y)

    assert in_torch(TorchGraph(model), x)["y0"].tolist() == in_runtime(model, x)["y0"].tolist()


@pytest.mark.parametrize("ceil", [0, 1])
@pytest.mark.parametrize("kind", ["MaxPool", "AveragePool", "counting AveragePool"])
def test_pools_have_the_windows_that_onnx_runtime_has(kind: str, ceil: int) -> None:
    x = {"x": normal(2, 3, 9, 8)}
    more = {"count_include_pad": 1} if "counting" in kind else {}
    for windows in padded_windows():
        if more and "auto_pad" in windows:
            continue  # ONNX Runtime 1.21 counts otherwise than newer ones
        attributes = {**windows, **more, "ceil_mode": ceil}
        model = graph_of(kind.rpartition(" ")[2], x, 19, **attributes)
        error = difference(in_torch(TorchGraph(model), x), in_runtime(model, x))
        assert error <= 1e-6, attributes


def test_convolutions_have_the_windows_that_onnx_runtime_has() -> None:
    x, constants = {"x": normal(2, 4, 9, 8)}, {"w": normal(6, 2, 3, 2), "b": normal(6)}
    for windows in padded_windows():
        if windows["kernel_shape"][0] == 3:
            attributes = {**windows, "kernel_shape": [3, 2], "group": 2}
            model = graph_of("Conv", x, 17, constants, **attributes)
            error = difference(in_torch(TorchGraph(model), x), in_runtime(model, x))
            assert error <= 1e-5, attributes


TRANSPOSED: list[dict[str, Any]] = [
    {},
    {"strides": [2, 3], "pads": [1, 0, 2, 1]},
    {"strides": [2, 2], "output_padding": [1, 1], "pads": [1, 1, 1, 1]},
    {"strides": [1, 1], "dilations": [2, 1]},
    {"strides": [2, 2], "auto_pad": "SAME_UPPER"},
    {"strides": [2, 2], "auto_pad": "SAME_LOWER"},
    {"strides": [2, 2], "auto_pad": "VALID"},
    {"strides": [3, 2], "output_shape": [14, 11]},
    {"strides": [3, 2], "output_shape": [14, 11], "auto_pad": "SAME_UPPER"},
]


@pytest.mark.parametrize("attributes", TRANSPOSED, ids=str)
def test_transposed_convolutions_cut_off_what_onnx_runtime_does(attributes: dict[str, Any]) -> None:
    x, constants = {"x": normal(2, 4, 5, 6)}, {"w": normal(4, 3, 3, 2), "b": normal(6)}
    model = graph_of("ConvTranspose", x, 17, constants, group=2, **attributes)

    assert difference(in_torch(TorchGraph(model), x), in_runtime(model, x)) <= 1e-5


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize(
    "where", ["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"]
)
def test_resizing_reads_where_onnx_runtime_does(mode: str, where: str) -> None:
    x = {"x": normal(1, 2, 5, 7)}
    for sizes in ((10, 14), (3, 4), (1, 9), (5, 13), (8, 5)):
        constants = {"roi": normal(0), "scales": normal(0), "sizes": ints(1, 2, *sizes)}
        rounding = {"nearest_mode": "floor"} if where == "asymmetric" else {}
        model = graph_of(
            "Resize",
            x,
            13,
            constants,
            mode=mode,
            coordinate_transformation_mode=where,
            **rounding,
        )
        error = difference(in_torch(TorchGraph(model), x), in_runtime(model, x))
        assert error <= 1e-5, sizes


@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers_begin_and_end_as_in_onnx_runtime(kind: str, direction: str) -> None:
    ways, gates = 1 + (direction == "bidirectional"), {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]
    x = {"x": normal(6, 3, 5)}
    constants: dict[str, NDArray[Any]] = {
        "w": normal(ways, gates * 4, 5),
        "r": -normal(ways, gates * 4, 4),
        "b": normal(ways, 2 * gates * 4),
        "h": normal(ways, 3, 4),
    }
    if kind == "LSTM":
        constants |= {"c": normal(ways, 3, 4)}
    more = {"linear_before_reset": 1} if kind == "GRU" else {}
    outputs = 3 if kind == "LSTM" else 2
    model = graph_of(kind, x, 14, constants, outputs, hidden_size=4, direction=direction, **more)
    model.graph.node[0].input.insert(4, "")  # lengths of sequences

    assert difference(in_torch(TorchGraph(model), x), in_runtime(model, x)) <= 1e-5


REFUSED = {
    "Cast": ({"to": TensorProto.STRING}, 1, "Cast to data type 8"),
    "BatchNormalization": ({"training_mode": 1}, 1, "in training mode; export the model with"),
    "MaxPool": ({"kernel_shape": [2, 2]}, 2, "MaxPool with its second output, the indices"),
    "Resize": ({"antialias": 1}, 1, "Resize with antialias"),
    "LSTM": ({"activations": ["Affine", "Tanh", "Tanh"]}, 1, "with the activation Affine"),
    "GRU": ({}, 1, "GRU without linear_before_reset"),
    "RNN": ({"direction": "reverse"}, 1, "RNN in reverse alone"),
    "Attention": ({"qk_matmul_output_mode": 1}, 3, "more outputs than the attended values"),
    "Constant": ({"value_string": "a"}, 1, "Constant of texts or of a sparse tensor"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_function_lacks_is_refused_before_anything_runs(kind: str) -> None:
    attributes, outputs, reason = REFUSED[kind]
    x = {} if kind == "Constant" else {"x": normal(1, 2, 4, 4)}
    model = graph_of(kind, x, 18, outputs=outputs, **attributes)

    with pytest.raises(UntrainableError, match=reason):
        TorchGraph(model)


def test_a_token_that_may_see_none_gets_zeros_and_no_gradient_is_nan() -> None:
    x = {name: normal(1, 1, 3, 4) for name in "qkv"}
    mask = np.array([[True, True, False], [False] * 3, [True] * 3])
    graph = TorchGraph(graph_of("Attention", x, 23, {"mask": mask}))
    fed = {name: torch.from_numpy(array).requires_grad_() for name, array in x.items()}

    answer = graph(fed)["y0"]
    answer.sum().backward()

    assert not answer[0, 0, 1].any()
    assert answer[0, 0, 0].any()
    assert all(tensor.grad.isfinite().all() for tensor in fed.values())
