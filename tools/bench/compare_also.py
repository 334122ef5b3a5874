"""Further models in ``eebench compare``: an exported bundle, a smaller or a quantised model."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Bundle, TensorSpec
from offramp.calibration.paired import plain_session
from offramp.engine.pipeline import Departure
from offramp.tools.bench.compare import NO_EXIT, OFFRAMP, SOURCE

_NAME = re.compile(r"[\w.+-]+")
_ORT_TYPES = {
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    "tensor(bool)": "bool",
    **{f"tensor({t})": t for t in ("float16", "int8", "int16", "int32", "int64")},
    **{f"tensor({t})": t for t in ("uint8", "uint16", "uint32", "uint64")},
}
"""numpy's names of ONNX Runtime's element types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Also:
    """A model that is measured along."""

    name: str
    """Of the system in tables and files."""
    path: Path


def parse_also(texts: Sequence[str]) -> tuple[Also, ...]:
    """Read the values of ``--also``: ``NAME=FILE.onnx`` each.

    Raises:
        ValueError: One is malformed, a name is taken, or a file is not there.
    """
    models: list[Also] = []
    taken = {SOURCE, OFFRAMP, NO_EXIT}
    for text in texts:
        name, equals, file = text.partition("=")
        if not equals or not file or not _NAME.fullmatch(name):
            raise ValueError(
                f"--also {text}: expected NAME=FILE.onnx, the name of letters, digits and ._+-"
            )
        if name in taken:
            raise ValueError(
                f"--also {text}: the name {name!r} is taken; taken are {', '.join(sorted(taken))}"
            )
        if not Path(file).is_file():
            raise ValueError(f"--also {text}: {file} is no file")
        taken.add(name)
        models.append(Also(name=name, path=Path(file)))
    return tuple(models)


class AlsoRunner:
    """A model in a session as ONNX Runtime makes it by default, as the source model is run."""

    def __init__(self, also: Also, bundle: Bundle, threads: int) -> None:
        """Load a model, and check that it takes what the bundle's source model does.

        Raises:
            ValueError: It does not, gives no such answer, or cannot be loaded.
        """
        where = f"--also {also.name}={also.path}"
        try:
            self._session = plain_session(str(also.path), threads)
        except Exception as error:  # ONNX Runtime's own classes derive from Exception only
            reason = str(error).splitlines()[0]
            raise ValueError(f"{where}: ONNX Runtime cannot load it: {reason}") from error
        _check_inputs(where, bundle.manifest.inputs, self._session.get_inputs())
        self._outputs = [_answer(where, bundle, self._session.get_outputs())]
        self._classes = bundle.manifest.answer.classes
        self._where = where

    def run(self, tensors: Mapping[str, NDArray[Any]]) -> Iterator[Departure]:
        """Give all rows together."""
        answer = self._answered(tensors)
        yield Departure(0, np.arange(len(answer)), answer, np.empty(0, np.float32))

    def warm_up(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Run a batch, and check what comes out.

        Raises:
            ValueError: It cannot be run on it, or gives another shape.
        """
        answer = self._answered(tensors)
        wanted = (len(next(iter(tensors.values()))), self._classes)
        if answer.shape != wanted:
            raise ValueError(
                f"{self._where}: its output {self._outputs[0]!r} has the shape "
                f"{list(answer.shape)}, expected {list(wanted)}"
            )

    def _answered(self, tensors: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
        try:
            (answer,) = self._session.run(self._outputs, tensors)
        except Exception as error:
            rows = len(next(iter(tensors.values())))
            reason = str(error).splitlines()[0]
            raise ValueError(f"{self._where}: fails on {rows} rows: {reason}") from error
        return np.asarray(answer)


def describe_also(models: Sequence[Also]) -> dict[str, dict[str, str]]:
    """Say which files were measured, by name, for the JSON document."""
    return {
        also.name: {
            "file": also.path.name,
            "sha256": hashlib.sha256(also.path.read_bytes()).hexdigest(),
        }
        for also in models
    }


def _check_inputs(where: str, specs: Sequence[TensorSpec], given: Sequence[Any]) -> None:
    """Compare names, types and fixed sizes; inputs that have a default are not among ``given``."""
    found = {value.name: value for value in given}
    same_names = found.keys() == {spec.name for spec in specs}
    if same_names and all(_fits(found[spec.name], spec) for spec in specs):
        return
    said = "; ".join(map(_describe, given)) or "nothing"
    wanted = "; ".join(spec.describe() for spec in specs)
    raise ValueError(f"{where}: it takes {said}; expected the bundle's inputs, {wanted}")


def _fits(found: Any, wanted: TensorSpec) -> bool:
    """Whether a model takes every tensor of a description, of any number of rows."""
    if _ORT_TYPES.get(found.type) != wanted.dtype or len(found.shape) != len(wanted.shape):
        return False
    return not isinstance(found.shape[0], int) and all(
        size == other or not isinstance(size, int)
        for size, other in zip(found.shape[1:], wanted.shape[1:], strict=True)
    )


def _describe(value: Any) -> str:
    sizes = ", ".join("?" if size is None else str(size) for size in value.shape)
    return f"{value.name}: {_ORT_TYPES.get(value.type, value.type)} [{sizes}]"


def _answer(where: str, bundle: Bundle, outputs: Sequence[Any]) -> str:
    """Name of the output to compare: that of the bundle's answer, or the only one."""
    answer = bundle.manifest.answer
    names = [output.name for output in outputs]
    if answer.output not in names and len(names) != 1:
        raise ValueError(
            f"{where}: none of its outputs {', '.join(names)} is called {answer.output!r}, as the "
            "bundle's answer is, and there are several"
        )
    name = answer.output if answer.output in names else names[0]
    (output,) = (o for o in outputs if o.name == name)
    sizes = output.shape
    if len(sizes) != 2 or (isinstance(sizes[1], int) and sizes[1] != answer.classes):
        raise ValueError(
            f"{where}: its output {name!r} has the shape {list(sizes)}, expected "
            f"[batch, {answer.classes}]"
        )
    return str(name)
