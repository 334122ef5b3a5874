"""Weights that several graphs share in one file: a bundle's, or a model's during compilation.

A graph may name a file for its weights instead of containing them (ONNX's external data). ONNX
Runtime maps that file: parallel sessions share all weights that they do not repack, and none parses
weights out of the graph, which took more memory than the weights themselves.

When a session loads, it packs weights for its kernels into its own copy
(:attr:`WeightForm.PACKED`). It can instead run on the mapped file, more slowly
(:attr:`WeightForm.SHARED`): then the subnets of a supernet share one copy of its weights
(SuperServe, 3).

File names in graphs of unknown origin are a risk: a bundle's graphs are checked before a session is
made of them (:mod:`offramp.bundle.graph_weights`). The file must always hold the true bytes,
because ONNX Runtime may read it even if the values were also passed in another way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from offramp.bundle import Bundle

_FOLDER_KEY: Final = "session.model_external_initializers_file_folder_path"
_MAKE_WEIGHTS: Final = (
    *("ConvMulFusion", "ConvAddFusion", "ConvBNFusion", "MatmulBNFusion"),
    *("AttentionFusion", "GemmTransposeFusion", "TransposeOptimizer", "ConstantFolding"),
)
"""Optimisers that compute new weights, which are in no file. They merge a layer with the scale and
shift after it (as in SubnetNorm), merge the three products of an attention, transpose weights, or
fold operators on constant weights."""
_RUN_ON_FILE: Final = (
    ("session.use_external_initializer_file_buffers_directly", "1"),
    ("session.disable_prepacking", "1"),
    ("optimization.disable_specified_optimizers", ";".join(_MAKE_WEIGHTS)),
)
_folder: ContextVar[Path | None] = ContextVar("_folder", default=None)


class WeightForm(StrEnum):
    """Form of a session's weights in memory."""

    PACKED = "packed"
    """Weights are packed for the kernels; each session has its own copy."""
    SHARED = "shared"
    """Weights stay as in the file, which all sessions map; those inside the graph are private."""


@contextmanager
def weights_in(folder: Path) -> Iterator[None]:
    """Make graphs that are loaded in this context find their named weights in a folder."""
    token = _folder.set(folder)
    try:
        yield
    finally:
        _folder.reset(token)


@contextmanager
def graphs_of(bundle: Bundle) -> Iterator[Callable[[str], bytes]]:
    """Yield a function that reads a bundle's graphs, by file, for sessions of this context.

    The graphs name their weights, which ONNX Runtime maps. If it cannot find the file, the graphs
    contain their weights, as other runtimes need them: at most 2 GiB then. Raises the errors of
    :meth:`.Bundle.read`.
    """
    folder = bundle.weight_folder()
    if folder is None or not is_text(folder):
        yield bundle.read
        return
    with weights_in(folder):
        yield bundle.graph


def is_text(folder: Path) -> bool:
    """Return whether a folder's name is UTF-8, as ONNX Runtime's settings require."""
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        return False
    return True


def weight_folder() -> Path | None:
    """Return the folder of :func:`weights_in`; ``None`` outside of it."""
    return _folder.get()


def name_weights(options: Any, folder: Path | None = None) -> None:
    """Set the folder of named weights in the options of an ONNX Runtime session, if there is one.

    Without ``folder`` it is that of :func:`weights_in`.
    """
    folder = folder or _folder.get()
    if folder is not None:
        options.add_session_config_entry(_FOLDER_KEY, str(folder))


def run_on_file(options: Any) -> None:
    """Make a session of ONNX Runtime run on the weights that it maps, without packed copies.

    Blocked layouts of convolutions must be off, too: their weights are always copies.
    """
    for key, value in _RUN_ON_FILE:
        options.add_session_config_entry(key, value)
