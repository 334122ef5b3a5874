"""Wrapping one ONNX file into a bundle without exits: ``eecompile wrap`` in a process."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Final

from offramp.engine.backends.custom_ops import libraries
from offramp.engine.common.compiler_process import BuildProcess
from offramp.engine.common.errors import EngineError

_log = logging.getLogger(__name__)

SUFFIX: Final = ".onnx"
_MOST_WORDS: Final = 2000
"""Largest number of characters of the compiler's error that are passed on."""
_PREFIX: Final = "eecompile: "
NOTE: Final = "note: "
"""Prefix of the lines of ``eecompile wrap`` about differences from the declared model."""


class OnnxFileError(EngineError):
    """An ONNX file that cannot be served unchanged; the message names the file and the remedy."""


def is_onnx_file(path: Path) -> bool:
    """Return whether a path to serve is an ONNX file rather than a bundle, which is a folder.

    Every regular file counts as an ONNX file. A missing file whose name ends in ``.onnx`` counts,
    too, so that reading it raises the error.
    """
    return path.is_file() or (path.suffix == SUFFIX and not path.is_dir())


async def wrap(
    path: Path, output: Path, *, answer: str | None = None, task: str | None = None
) -> None:
    """Write the bundle of an ONNX file to ``output``, which must not exist.

    ``answer`` names the output to serve, which a file with several outputs needs; ``task`` is the
    kind of the answer, or ``None`` to derive it from the answer's shape. A new process does the
    work, with the same libraries of custom operators as this process. The new process ends when
    this process ends, or when the caller is cancelled; ``output`` is then a whole bundle or absent.

    Raises:
        OnnxFileError: The file cannot be wrapped, a package is missing, or no process starts.
    """
    try:
        process = BuildProcess(_arguments(path, output, answer, task))
    except OSError as error:
        raise OnnxFileError(
            f"{path}: no process can be started to read it ({error}); free memory or processes, "
            f"or write the bundle before: eecompile wrap {path}"
        ) from error
    try:
        if status := await asyncio.to_thread(process.wait):
            raise OnnxFileError(_reason(path, status, process.last_words(_MOST_WORDS)))
        for note in process.lines(NOTE):
            _log.warning("%s: %s", path, note[:_MOST_WORDS])
    finally:
        process.end()


def _arguments(path: Path, output: Path, answer: str | None, task: str | None) -> list[str]:
    found = ["wrap", str(path.absolute()), "--output", str(output.absolute())]
    if answer is not None:
        found.append(f"--answer={answer}")
    if task is not None:
        found.append(f"--task={task}")
    for library in libraries():
        found += ["--custom-ops", str(library.path.absolute())]
    return found


def _reason(path: Path, status: int, said: str) -> str:
    """Return the compiler's error, which names the file, or how its process ended."""
    if said.startswith(_PREFIX):
        return said.removeprefix(_PREFIX).replace(str(path.absolute()), str(path))
    how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    return (
        f"{path}: the process that reads it {how}; its last output: {said}; "
        f"run eecompile wrap {path} to see all"
    )
