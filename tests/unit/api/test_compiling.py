"""Arguments and refusals of ``offramp.compile``, and paths of bundles; nothing is trained here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import onnx
import pytest
import torch
from tests.facts import Told, facts, tells
from tests.models import mlp
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import offramp
from offramp.api import ExportCheckError, ModuleExportError, compiling
from offramp.api.compiling import CompileKeywords
from offramp.api.torch_export import ExampleCall, export_module
from offramp.bundle import BundleExistsError, TensorSpec
from offramp.calibration.data.errors import DataError
from offramp.calibration.data.scratch import ScratchSpace
from offramp.compiler.commands.arguments import compile_parser
from offramp.compiler.common.errors import ModelError
from offramp.compiler.common.options import CompileOptions
from offramp.engine.answers.criteria import CriterionError

X = np.random.default_rng(0).standard_normal((800, 16)).astype(np.float32)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop, self.head = nn.Linear(16, 8), nn.Dropout(), nn.Linear(8, 3)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        hidden = self.drop(self.inner(x).relu())
        logits: Tensor = self.head(hidden if scale is None else hidden * scale)
        return logits


class CapturedOptions:
    """Stands in for the compiler: keeps what it is asked, and reads model and data."""

    def __init__(self) -> None:
        self.options: CompileOptions | None = None
        self.model: onnx.ModelProto | None = None
        self.arrays: Mapping[str, Any] = {}

    def __call__(self, options: CompileOptions, progress: object, **_: object) -> str:
        self.options, self.model = options, onnx.load(options.model)
        specs = compiling_specs(self.model)
        assert not isinstance(options.data, Path)
        self.arrays, _digest = options.data.load(specs, ScratchSpace())
        return "the bundle"


def compiling_specs(model: onnx.ModelProto) -> list[TensorSpec]:
    names = [tensor.name for tensor in model.graph.input]
    return [TensorSpec(name=name, dtype="float32", shape=("batch", 16)) for name in names]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[CapturedOptions]:
    from offramp.compiler.steps import compile as module

    asked = CapturedOptions()
    monkeypatch.setattr(module, "compile_model", asked)
    monkeypatch.chdir(tmp_path)
    yield asked


def names(model: onnx.ModelProto | None) -> list[str]:
    assert model is not None
    return [tensor.name for tensor in model.graph.input]


def test_a_file_is_compiled_beside_itself_with_options_by_the_flags_names(
    asked: CapturedOptions, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    onnx.save(mlp(layers=2), tmp_path / "in" / "m.onnx")
    np.savez(tmp_path / "x.npz", x=X)
    made = offramp.compile(
        tmp_path / "in" / "m.onnx",
        str(tmp_path / "x.npz"),
        max_disagreement=0.02,
        confidence=0.9,
        epochs=3,
        seed=7,
        exits=["25%", "*/Add*"],
        simplify=False,
        scratch=str(tmp_path),
    )
    assert made == "the bundle"  # type: ignore[comparison-overlap]
    options = asked.options
    assert options is not None
    assert (options.model, options.output) == (tmp_path / "in/m.onnx", tmp_path / "in/m.ee")
    assert (options.promise.max_disagreement, options.promise.confidence_level) == (0.02, 0.9)
    training = options.building.training
    assert (training.epochs, training.seed, options.seed) == (3, 7, 7)
    assert (options.building.exits, options.reading.simplify) == (("25%", "*/Add*"), False)
    assert options.scratch == tmp_path
    assert np.array_equal(asked.arrays["x"], X)


@pytest.mark.parametrize(
    "data",
    [
        X[:50],
        (X[:50],),
        {"x": torch.from_numpy(X[:50])},
        DataLoader(TensorDataset(torch.from_numpy(X[:50])), batch_size=16),
        DataLoader(TensorDataset(torch.from_numpy(X[:63])), batch_size=50, drop_last=True),
    ],
    ids=["array", "tuple", "tensor", "loader", "drop_last"],
)
def test_too_few_samples_are_refused_before_the_export(
    asked: CapturedOptions, monkeypatch: pytest.MonkeyPatch, data: object
) -> None:
    exports: list[object] = []
    monkeypatch.setattr("offramp.api.torch_export.export_module", exports.append)
    message = facts("50 calibration samples are too few", "needs 299", "give at least 703")
    with pytest.raises(DataError, match=message):
        offramp.compile(Net(), data)
    assert (exports, asked.options) == ([], None)


def test_batches_of_unknown_size_are_not_counted_before_the_export(asked: CapturedOptions) -> None:
    few = TensorDataset(torch.from_numpy(X[:8]))
    rows = DataLoader(few, batch_size=8, collate_fn=lambda _: (torch.from_numpy(X[:500]),))
    offramp.compile(Net(), rows)
    assert len(asked.arrays["x"]) == 500


class _Repeating(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([(torch.from_numpy(X[:50]),)] * 20)


def test_a_loader_that_makes_its_own_batches_is_not_counted(asked: CapturedOptions) -> None:
    offramp.compile(Net(), _Repeating(TensorDataset(torch.from_numpy(X[:50])), batch_size=50))
    assert len(asked.arrays["x"]) == 1_000


def test_a_proto_is_compiled_into_the_working_directory(asked: CapturedOptions) -> None:
    offramp.compile(mlp(layers=2), {"x": X})
    assert asked.options is not None
    assert asked.options.output == Path("model.ee")
    assert names(asked.model) == ["x"]
    assert not asked.options.model.exists()  # a temporary file
    assert np.array_equal(asked.arrays["x"], X)


def batches(size: int = 16, *, labelled: bool = True) -> list[tuple[Tensor, ...]]:
    x, y = torch.from_numpy(X), torch.arange(len(X))
    return [
        (x[i : i + size], *((y[i : i + size],) if labelled else ())) for i in range(0, len(X), size)
    ]


@pytest.mark.parametrize(
    "data",
    [
        DataLoader(TensorDataset(torch.from_numpy(X), torch.arange(len(X))), batch_size=16),
        DataLoader(TensorDataset(torch.from_numpy(X)), batch_size=16),
        batches(),
        batches(labelled=False),
        [batch[0] for batch in batches()],
        [{"x": batch[0], "labels": batch[1]} for batch in batches()],
        {"x": X},
        {"x": torch.from_numpy(X), "label": np.arange(len(X))},
        X,
        (X,),
        lambda: iter(batches()),
    ],
    ids=lambda data: type(data).__name__,
)
def test_a_module_is_exported_with_the_first_batch_of_whatever_has_batches(
    asked: CapturedOptions, data: object
) -> None:
    module = Net()
    offramp.compile(module, data() if callable(data) else data)
    assert asked.options is not None
    assert asked.options.output == Path("Net.ee")
    assert asked.options.model.name == "Net.onnx"
    assert names(asked.model) == ["x"]
    assert np.array_equal(asked.arrays["x"], X)  # the first batch is in it
    assert module.training


def test_example_inputs_say_which_inputs_the_model_has(asked: CapturedOptions) -> None:
    scale = torch.ones(2, 8)
    offramp.compile(Net(), {"x": X}, example_inputs=(torch.from_numpy(X[:2]), scale), output="a.ee")
    assert names(asked.model) == ["x", "scale"]
    offramp.compile(Net(), {"x": X}, example_inputs={"x": X[:2]})
    assert names(asked.model) == ["x"]
    batch = asked.model.graph.input[0].type.tensor_type.shape.dim[0]  # type: ignore[union-attr]
    assert batch.dim_param


class ByArguments(nn.Module):
    def forward(self, *tensors: Tensor, **named: Tensor) -> tuple[Tensor, Tensor]:
        return tensors[0] + tensors[1], 2 * named["last"]


class Branching(nn.Module):
    """The older exporter writes one branch; the newer one names the choice."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x - 1


class Watching(nn.Module):
    """Takes another branch outside the exporters, where a sum is below 0."""

    def forward(self, x: Tensor) -> Tensor:
        other = type(x) is Tensor and not torch.compiler.is_exporting() and bool(x.sum() < 0)
        return x - 1 if other else x + 1


class Unlike(nn.Module):
    """Answers otherwise on each call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


class Broken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("nothing works")


class Words(nn.Module):
    def forward(self, x: Tensor) -> str:
        return "words"


class ByNumpy(nn.Module):
    """Exporters see a constant: the answer to the example."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(np.sort(x.numpy()))


class Unexportable(nn.Module):
    """ONNX has no such operator."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.linalg.eigvalsh(x.T @ x)


def test_a_module_with_free_arguments_and_several_outputs(
    asked: CapturedOptions, tmp_path: Path
) -> None:
    from offramp.api.torch_export import ExampleCall, export_module

    call = ExampleCall(ByArguments(), (X, X))
    assert list(call.tensors) == ["tensors_0", "tensors_1"]
    path = tmp_path / "m.onnx"

    class Two(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": x + 1, "hidden": x * 2}

    export_module(Two(), X, path)
    assert [tensor.name for tensor in onnx.load(path).graph.output] == ["logits", "hidden"]


def test_the_older_exporter_helps_out_and_a_line_says_so(
    asked: CapturedOptions,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    export = ExampleCall.export

    def failing(call: ExampleCall, path: Path, outputs: list[str], *, dynamo: bool) -> None:
        if dynamo:
            print("torch says much")
            raise RuntimeError("no such operator\nand more")
        export(call, path, outputs, dynamo=dynamo)

    monkeypatch.setattr(ExampleCall, "export", failing)
    offramp.compile(Net(), {"x": X})
    assert names(asked.model) == ["x"]
    (told,) = [r.getMessage() for r in caplog.records if r.name == "offramp.api.torch_export"]
    tells(told, "Net", "RuntimeError: no such operator")
    assert capfd.readouterr().out == ""


def test_a_choice_by_values_is_refused_in_one_line(
    asked: CapturedOptions, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ModuleExportError, match=r"^Branching\.forward chooses its computation"):
        offramp.compile(Branching(), {"x": X})
    assert capfd.readouterr() == ("", "")


def test_the_export_is_checked_on_batches_of_one_and_of_several(tmp_path: Path) -> None:
    rows = np.ones((20, 16), np.float32)
    rows[6] = -1  # the whole batch, and the example, take the branch of the others
    with pytest.raises(ExportCheckError, match=facts("differs", "batch of 1")):
        export_module(Watching(), rows, tmp_path / "m.onnx")


Call = Callable[[], object]


@pytest.mark.parametrize(
    ("call", "kind", "told"),
    [
        (
            lambda: offramp.compile("m.onnx", X, max_disagrement=0.01),  # type: ignore[call-arg]
            TypeError,
            ("compile()", "'max_disagrement'", "max_disagreement"),
        ),
        (
            lambda: offramp.compile("m.onnx", X, max_disagreement=2),
            ValueError,
            ("max_disagreement is 2", "above 0 and below 1"),
        ),
        (
            lambda: offramp.compile("m.onnx", X, confidence=1),
            ValueError,
            ("confidence is 1", "above 0"),
        ),
        (lambda: offramp.compile("m.onnx", X, epochs=0), ValueError, ("epochs is 0", "at least 1")),
        (
            lambda: offramp.compile("m.onnx", X, task="clasify"),  # type: ignore[arg-type]
            ValueError,
            ("task is 'clasify'", "'classification' or", "'auto'"),
        ),
        (lambda: offramp.compile("m.onnx", X, exits="25%"), ValueError, ("exits is '25%'", "list")),
        (lambda: offramp.compile("m.onnx", X, criterion="luck"), CriterionError, ("luck",)),
        (
            lambda: offramp.compile("m.onnx", X, train="joint", precision="int8"),
            ValueError,
            ("train joint", "precision int8"),
        ),
        (
            lambda: offramp.compile("m.onnx", X, joint_rate=0.1),
            ValueError,
            ("joint_rate", "train joint", "add train joint"),
        ),
        (
            lambda: offramp.compile("m.onnx", X, image_size=(224,)),
            ValueError,
            ("image_size", "'224'", "height and width"),
        ),
        (lambda: offramp.compile(Net(), "x.npz"), TypeError, ("Net", "example_inputs=(tensor, …)")),
        (lambda: offramp.compile(Net(), []), TypeError, ("data", "batches", "at least one")),
        (
            lambda: offramp.compile(Net(), X, example_inputs=(X, X, X)),
            TypeError,
            ("Net.forward(x, scale)", "too many positional arguments", "tuple"),
        ),
        (
            lambda: offramp.compile(Net(), X, example_inputs={"y": X}),
            TypeError,
            ("Net.forward(x, scale)", "'x'", "tuple"),
        ),
        (
            lambda: offramp.compile(Net(), X, example_inputs=(X, "a")),
            TypeError,
            ("example_inputs", "scale is a str", "tensor [batch, …]"),
        ),
        (
            lambda: offramp.compile(Net(), X, example_inputs=(X[:0],)),
            TypeError,
            ("example_inputs", "x has shape [0, 16]", "[batch, …]"),
        ),
        (
            lambda: offramp.compile(Net(), X, example_inputs=(X[:3], torch.ones(2, 8))),
            TypeError,
            ("example_inputs", "x [3, 16], scale [2, 8]", "same number"),
        ),
        (
            lambda: offramp.compile(Net(), X[:, :4]),
            ModuleExportError,
            ("Net", "RuntimeError: mat1", "pass others"),
        ),
        (
            lambda: offramp.compile(Broken(), X),
            ModuleExportError,
            ("Broken", "ValueError: nothing works", "pass others"),
        ),
        (
            lambda: offramp.compile(Words(), X),
            ModuleExportError,
            ("Words", "str", "a tensor, a tuple of tensors, or a mapping"),
        ),
        (
            lambda: offramp.compile(Unexportable(), X),
            ModuleExportError,
            ("Unexportable", "ONNX", "Export it yourself"),
        ),
        (
            lambda: offramp.compile(Unlike(), X),
            ExportCheckError,
            ("Unlike", "differs", "batch of", "same answer"),
        ),
        (
            lambda: offramp.compile(ByNumpy(), X),
            ExportCheckError,
            ("ByNumpy", "batch of", "[4, 16], expected [64, 16]", "torch alone"),
        ),
        (
            lambda: offramp.compile(3, X),  # type: ignore[arg-type]
            TypeError,
            ("model is a int", "ONNX file", "onnx.ModelProto", "torch"),
        ),
        (lambda: offramp.compile("/", X), ValueError, ("model is '/'", "ONNX file")),
    ],
)
def test_what_is_refused(
    asked: CapturedOptions, call: Call, kind: type[Exception], told: Told, tmp_path: Path
) -> None:
    onnx.save(mlp(layers=2), "m.onnx")
    with pytest.raises(kind, match=facts(*told)):
        call()
    assert asked.options is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.onnx"]


def test_a_target_that_is_taken_is_refused_before_anything_is_exported(
    asked: CapturedOptions, tmp_path: Path
) -> None:
    (tmp_path / "Broken.ee").mkdir()
    with pytest.raises(BundleExistsError, match=r"Broken\.ee exists"):
        offramp.compile(Broken(), X)


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_text("no model")
    with pytest.raises(ModelError, match="not an ONNX file"):
        offramp.compile(tmp_path / "m.onnx", {"x": X})
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


def test_progress_is_shown_where_it_is_asked_for(
    asked: CapturedOptions, capsys: pytest.CaptureFixture[str]
) -> None:
    offramp.compile(Net(), {"x": X})
    assert capsys.readouterr().err == ""
    offramp.compile(Net(), {"x": X}, progress=True, overwrite=True)
    assert "Export the module" in capsys.readouterr().err


NOT_KEYWORDS = {
    "--help": "of the command line",
    "--help-all": "of the command line",
    "--version": "of the command line",
    "--completion": "of the command line",
    "--backend": "engines are built by eecompile build",
    "--data": "an argument of its own",
    "--output": "an argument of its own",
    "--overwrite": "an argument of its own",
    "--max-disagreement": "an argument of its own",
    "--custom-ops": "code: offramp.engine.backends.custom_ops.using_libraries",
    "--criterion-module": "code: offramp.engine.answers.criteria.register",
    "--preprocessing": "its content has keywords",
    "--progress-file": "of the process that a server starts",
}


def test_every_flag_is_a_keyword() -> None:
    flags = {
        flag
        for action in compile_parser()._actions
        for flag in action.option_strings
        if flag.startswith("--")
    }
    assert flags >= NOT_KEYWORDS.keys()
    keywords = {
        "--" + flag.removeprefix("--no-").removeprefix("--") for flag in flags - NOT_KEYWORDS.keys()
    }
    known = {f"--{name.replace('_', '-')}" for name in get_type_hints(CompileKeywords)}
    assert keywords == known
    assert compiling.compile is offramp.compile
