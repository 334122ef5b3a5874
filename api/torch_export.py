"""Torch modules as ONNX files: exported by torch's exporters, and checked against the module."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import nn

from offramp.api.errors import ExportCheckError, ModuleExportError
from offramp.compiler.runtime import GraphRunner
from offramp.engine.differences import compare

_log = logging.getLogger(__name__)

ROWS: Final = 4
"""Samples of the example inputs that are exported with and checked."""
_TOLERANCE: Final = 1e-3
_TOLERANCE_OF_HALF: Final = 5e-2
"""Shares of an output's scale that two runtimes may differ by."""


class ExampleCall:
    """A call of a module's ``forward`` with a few samples of the example inputs."""

    def __init__(self, module: nn.Module, inputs: object) -> None:
        """Bind inputs to parameters: a tensor, a tuple in their order, or a mapping by name.

        TypeError if they do not fit.
        """
        self.module = module
        self._bound = _bind(module, inputs)
        device = next((t.device for t in [*module.parameters(), *module.buffers()]), None)
        self.tensors: dict[str, torch.Tensor] = {}
        """Rows by input name, in the order of ``forward``."""
        for name, value in self._bound.arguments.items():
            self._bound.arguments[name] = self._mapped(
                name, value, lambda n, v: _rows(n, v, device)
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
        """Run the module; return its outputs by the names that the ONNX model gives them.

        ModuleExportError if it fails, or returns anything but tensors.
        """
        kind = type(self.module).__name__
        try:
            answer = self.module(*self._bound.args, **self._bound.kwargs)
        except Exception as error:
            raise ModuleExportError(
                f"{kind} fails on the example inputs ({_line(error)}); give others: "
                "example_inputs=(tensor, …), or a mapping by the parameters of forward"
            ) from error
        if isinstance(answer, torch.Tensor):
            return {"output": answer}
        if isinstance(answer, Mapping):  # what the models of transformers return is one
            return {str(k): value for k, value in answer.items() if torch.is_tensor(value)}
        if isinstance(answer, Sequence) and all(map(torch.is_tensor, answer)):
            return {f"output_{place}": each for place, each in enumerate(answer)}
        raise ModuleExportError(
            f"{kind} returns a {type(answer).__name__}, expected a tensor, a tuple of tensors, or "
            "a mapping from names to tensors; wrap it in a module that returns one"
        )

    def export(self, path: Path, output_names: Sequence[str], *, dynamo: bool) -> None:
        """Write the module with one of torch's exporters, whatever that raises."""
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
    """Write a module as an ONNX file whose batch may have any size.

    ``example_inputs`` is a tensor, a tuple of them in the order of ``forward``, or a mapping by the
    names of its parameters, which become the names of the model's inputs. The module is run as in
    ``module.eval()``, and left as it was.

    Raises:
        TypeError: The example inputs are not what ``forward`` takes.
        ImportError: A package of torch's exporter is missing.
        ModuleExportError: Neither of torch's exporters can export it, or it fails on the inputs.
        ExportCheckError: ONNX Runtime answers otherwise than the module.
    """
    call = ExampleCall(module, example_inputs)
    with _evaluating(module), torch.no_grad():
        wanted = {name: tensor.cpu().numpy() for name, tensor in call.outputs().items()}
        _export(call, list(wanted), path)
        _check(call, wanted, path)


def _export(call: ExampleCall, outputs: Sequence[str], path: Path) -> None:
    """Export with the exporter that torch recommends, and where that fails with the older one."""
    kind = type(call.module).__name__
    with _quiet():
        try:
            call.export(path, outputs, dynamo=True)
        except ImportError:
            raise
        except Exception as first:
            try:
                call.export(path, outputs, dynamo=False)
            except Exception as second:
                raise ModuleExportError(
                    f"{kind} cannot be exported to ONNX: {_line(first)}. The older exporter: "
                    f"{_line(second)}. Export it yourself with torch.onnx.export, and give the file"
                ) from first
            _log.warning(
                "%s was exported with torch's older exporter, as the newer one failed: %s",
                kind,
                _line(first),
            )


def _check(call: ExampleCall, wanted: Mapping[str, NDArray[Any]], path: Path) -> None:
    """Compare the exported model with the module, on all example samples and on the first."""
    kind = type(call.module).__name__
    inputs = {name: tensor.cpu().numpy() for name, tensor in call.tensors.items()}
    runner = GraphRunner(onnx.load(path))
    for rows in (slice(None), slice(1)):
        given = {name: array[rows] for name, array in inputs.items()}
        count = len(next(iter(given.values())))
        try:
            found = runner.run(given)
        except (RuntimeError, KeyError) as error:
            raise ExportCheckError(
                f"{kind}: the exported model fails on {count} of the example samples "
                f"({_line(error)}), the module does not; its batch has to be free: use no sizes of "
                "the first dimension as plain numbers in forward"
            ) from error
        for name, array in wanted.items():
            allowed = _TOLERANCE_OF_HALF if array.dtype == np.float16 else _TOLERANCE
            difference = compare(found[name], array[rows])
            if difference.share > allowed:
                raise ExportCheckError(
                    f"{kind}: the exported model's {name} differs from the module's on {count} of "
                    f"the example samples by {difference.describe()}, expected at most {allowed:g} "
                    "of the scale; forward must compute with torch alone, and give each sample the "
                    "same answer every time, whatever else is in its batch"
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
            f"example_inputs do not fit {type(module).__name__}.forward({names}): {error}; give a "
            "tuple in this order, or a mapping by these names"
        ) from error


def _rows(name: str, value: object, device: torch.device | None) -> torch.Tensor:
    """Return a few samples of an input on the module's device, and at least two.

    Torch's exporter takes a batch of one for a fixed size.
    """
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
    rows = tensor[:ROWS] if len(tensor) > 1 else torch.cat([tensor, tensor])
    return rows.detach().to(device)


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Switch dropout and batch statistics off, in whichever parts have them on."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep warnings of torch about its own ways from the user."""
    exporter = logging.getLogger("torch.onnx")
    level = exporter.level
    exporter.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        exporter.setLevel(level)


def _line(error: Exception) -> str:
    """Return the first line of an error's message, with its kind."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]:.200}" if lines else type(error).__name__
