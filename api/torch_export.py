"""Torch modules as ONNX files: exported with torch's exporters, compared with the module."""

from __future__ import annotations

import inspect
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from offramp.api.errors import ExportCheckError, ModuleExportError
from offramp.compiler.graphs.runtime import GraphRunner
from offramp.engine.answers.differences import compare
from offramp.engine.graphs.external_weights import weights_in

_log = logging.getLogger(__name__)

ROWS: Final = 4
"""Number of samples of the example inputs that the export uses."""
_BATCHES: Final = (slice(0, 64), *(slice(i, i + 1) for i in range(8)), slice(8, 11), slice(11, 18))
"""Batches of the example inputs that the check uses, if there are enough samples."""
_TOLERANCE: Final = 1e-3
_TOLERANCE_OF_HALF: Final = 5e-2
"""Largest difference of float16 values between two runtimes, as a share of an output's scale."""
_LOGGERS: Final = ("torch.onnx", "torch.fx.experimental.symbolic_shapes", "torch._dynamo")
"""Torch loggers that the exporters write to."""


class ExampleCall:
    """A call of a module's ``forward`` with a few samples of the example inputs."""

    def __init__(self, module: nn.Module, inputs: object, rows: slice | None = None) -> None:
        """Bind a tensor, a tuple or a mapping by name to the parameters of ``forward``.

        ``rows`` selects the samples; ``None`` selects those for the export, at least two, because
        torch's exporter treats a batch of one as a fixed size. TypeError if the inputs do not fit.
        """
        self.module = module
        self._bound = _bind(module, inputs)
        device = next((t.device for t in [*module.parameters(), *module.buffers()]), None)
        self.tensors: dict[str, torch.Tensor] = {}
        """Selected samples of each input, by the input's name, in the order of ``forward``."""
        for name, value in self._bound.arguments.items():
            self._bound.arguments[name] = self._mapped(
                name, value, lambda n, v: _rows(n, v, device, rows)
            )
        for name, value in self._bound.arguments.items():
            self._mapped(name, value, self.tensors.__setitem__)
        if len({len(tensor) for tensor in self.tensors.values()}) != 1:
            sizes = ", ".join(f"{name} {list(t.shape)}" for name, t in self.tensors.items())
            raise TypeError(
                f"example_inputs are {sizes or 'empty'}, expected the same number of samples in "
                "the first dimension of each"
            )

    def _mapped(self, name: str, value: Any, function: Callable[[str, Any], Any]) -> Any:
        """Apply a function to a parameter's value, or to each of ``*args`` and ``**kwargs``."""
        kind = self._bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            return tuple(function(f"{name}_{place}", each) for place, each in enumerate(value))
        if kind is inspect.Parameter.VAR_KEYWORD:
            return {key: function(key, each) for key, each in value.items()}
        return function(name, value)

    def outputs(self) -> dict[str, torch.Tensor]:
        """Run the module; return its outputs by their names in the ONNX model.

        ModuleExportError if the module fails, or returns something other than tensors.
        """
        kind = type(self.module).__name__
        try:
            answer = self.module(*self._bound.args, **self._bound.kwargs)
        except Exception as error:
            raise ModuleExportError(
                f"{kind} fails on the example inputs ({_line(error)}), which are the first batch "
                "of the data if none are given; correct their dtype, shape and order, or pass "
                "others: example_inputs=(tensor, …), or a mapping by the parameters of forward"
            ) from error
        if isinstance(answer, torch.Tensor):
            return {"output": answer}
        if isinstance(answer, Mapping):  # for example outputs of transformers
            return {str(k): value for k, value in answer.items() if torch.is_tensor(value)}
        if isinstance(answer, Sequence) and all(map(torch.is_tensor, answer)):
            return {f"output_{place}": each for place, each in enumerate(answer)}
        raise ModuleExportError(
            f"{kind} returns a {type(answer).__name__}, expected a tensor, a tuple of tensors, or "
            "a mapping from names to tensors; wrap it in a module that returns one"
        )

    def export(self, path: Path, output_names: Sequence[str], *, dynamo: bool) -> None:
        """Write the module with one of torch's exporters, which may raise any exception."""
        free = torch.export.Dim.DYNAMIC
        sizes: dict[str, Any] = {
            name: self._mapped(name, value, lambda *_: {0: free})
            for name, value in self._bound.arguments.items()
        }
        how: dict[str, Any] = {"dynamic_shapes": sizes, "verbose": False}
        if not dynamo:
            how = {"dynamic_axes": {n: {0: "batch"} for n in [*self.tensors, *output_names]}}
        torch.onnx.export(
            self.module,
            self._bound.args,
            path,
            kwargs=self._bound.kwargs,
            input_names=list(self.tensors),
            output_names=list(output_names),
            dynamo=dynamo,
            **how,
        )


def export_module(module: nn.Module, example_inputs: object, path: Path) -> None:
    """Write a module as an ONNX file with a free batch size.

    ``example_inputs`` is a tensor, a tuple in the order of ``forward``, or a mapping by the names
    of its parameters, which become the names of the model's inputs. The module runs in evaluation
    mode, and its mode is restored afterwards.

    Raises:
        TypeError: The example inputs do not fit ``forward``.
        ImportError: A package of torch's exporter is missing.
        ModuleExportError: Both of torch's exporters fail, or the module fails on the inputs.
        ExportCheckError: ONNX Runtime's answers differ from the module's.
    """
    call = ExampleCall(module, example_inputs)
    with _evaluating(module), torch.no_grad():
        _export(call, list(call.outputs()), path)
        _check(module, example_inputs, path)


def _export(call: ExampleCall, outputs: Sequence[str], path: Path) -> None:
    """Export with the exporter that torch recommends; if that fails, with the older exporter."""
    with _quiet():
        failure = _try_exporters(call, outputs, path)
    if failure:
        _log.warning(
            "%s was exported with torch's older exporter, because the newer one failed: %s",
            type(call.module).__name__,
            failure,
        )


def _try_exporters(call: ExampleCall, outputs: Sequence[str], path: Path) -> str:
    """Export; return why the newer exporter failed, or an empty text if it succeeded."""
    kind = type(call.module).__name__
    try:
        call.export(path, outputs, dynamo=True)
    except ImportError:
        raise
    except Exception as first:
        if _depends_on_values(first):
            # The older exporter would record only the branch that the example inputs take.
            raise ModuleExportError(
                f"{kind}.forward chooses its computation by the values of its inputs, as in "
                "`if x.sum() > 0`, which torch cannot express in an ONNX file; compute both "
                "and choose with torch.where, or move the choice out of the module"
            ) from first
        try:
            call.export(path, outputs, dynamo=False)
        except Exception as second:
            raise ModuleExportError(
                f"{kind} cannot be exported to ONNX: {_line(first)}. The older exporter: "
                f"{_line(second)}. Export it yourself with torch.onnx.export, and pass the file"
            ) from first
        return _line(first)
    return ""


def _depends_on_values(error: BaseException | None) -> bool:
    """Return whether an exporter failed because the module's code reads values of tensors."""
    while error is not None:
        if isinstance(error, GuardOnDataDependentSymNode):
            return True
        error = error.__cause__ or error.__context__
    return False


def _check(module: nn.Module, example_inputs: object, path: Path) -> None:
    """Compare the exported model with the module, on batches of one sample and of several."""
    with weights_in(path.parent.resolve()):
        runner = GraphRunner(onnx.load(path, load_external_data=False))
    count = len(next(iter(ExampleCall(module, example_inputs, slice(None)).tensors.values())))
    for rows in _BATCHES:
        if rows.start < count:
            _check_batch(ExampleCall(module, example_inputs, rows), runner)


def _check_batch(call: ExampleCall, runner: GraphRunner) -> None:
    kind = type(call.module).__name__
    given = {name: tensor.cpu().numpy() for name, tensor in call.tensors.items()}
    samples = _samples(len(next(iter(given.values()))))
    wanted = {name: tensor.cpu().numpy() for name, tensor in call.outputs().items()}
    try:
        found = runner.run(given)
    except (RuntimeError, KeyError) as error:
        raise ExportCheckError(
            f"{kind}: the exported model fails on a batch of {samples} ({_line(error)}), the "
            "module does not; the batch size must stay free: do not use the size of the first "
            "dimension as a plain number in forward"
        ) from error
    for name, array in wanted.items():
        allowed = _TOLERANCE_OF_HALF if array.dtype == np.float16 else _TOLERANCE
        difference = compare(found[name], array)
        if difference.share > allowed:
            raise ExportCheckError(
                f"{kind}: the exported model's {name} differs from the module's on a batch of "
                f"{samples} by {difference.describe()}, expected at most {allowed:g} of the scale; "
                "forward must compute with torch alone, not branch in Python on the values of its "
                "inputs, and give each sample the same answer every time, whatever else is in its "
                "batch"
            )


def _bind(module: nn.Module, inputs: object) -> inspect.BoundArguments:
    signature = inspect.signature(module.forward)
    try:
        if isinstance(inputs, Mapping):
            return signature.bind(**inputs)
        return signature.bind(*(inputs if isinstance(inputs, tuple | list) else (inputs,)))
    except TypeError as error:
        names = ", ".join(signature.parameters)
        raise TypeError(
            f"example_inputs, or the first batch of the data, do not fit "
            f"{type(module).__name__}.forward({names}): {error}; pass a tuple in this order, or a "
            "mapping by these names"
        ) from error


def _samples(count: int) -> str:
    return "1 sample" if count == 1 else f"{count} samples"


def _rows(
    name: str, value: object, device: torch.device | None, rows: slice | None
) -> torch.Tensor:
    """Return samples of an input on the module's device."""
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"example_inputs: {name} is a {type(value).__name__}, expected a tensor [batch, …]"
        ) from error
    if not tensor.ndim or not len(tensor):
        raise TypeError(
            f"example_inputs: {name} has shape {list(tensor.shape)}, expected [batch, …] with at "
            "least one sample"
        )
    if rows is None:
        taken = tensor[:ROWS] if len(tensor) > 1 else torch.cat([tensor, tensor])
    else:
        taken = tensor[rows]
    return taken.detach().to(device)


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Switch off dropout and batch statistics in submodules, and restore their modes afterwards."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the output, logs and warnings of torch's exporters."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(),
            redirect_stdout(io.StringIO()),
            redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _line(error: BaseException) -> str:
    """Return an error's class, and the first line of its message.

    A TorchExportError is reported by its cause, since its own message only names an export step.
    """
    if type(error).__name__ == "TorchExportError" and error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]:.200}" if lines else type(error).__name__
