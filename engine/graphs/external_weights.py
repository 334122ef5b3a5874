"""Weights that several graphs share in one file: a bundle's, or a model's while it is compiled.

A graph may name a file for its weights instead of holding them (ONNX's external data). ONNX Runtime
maps them from there: sessions beside each other do not hold a copy each of what they do not pack
anew, and none parses weights out of the graph, which took more memory than the weights themselves.

What kernels want otherwise they pack when they are loaded, into a copy of each session's own
(:attr:`WeightForm.PACKED`). Sessions may do without, run on the mapped file itself, and take longer
(:attr:`WeightForm.SHARED`): many subnets of a supernet then hold its weights once (SuperServe, 3).

A name in a file from elsewhere must lead nowhere: a bundle's graphs are looked at before a session
is made of them (:mod:`offramp.bundle.graph_weights`). And the file must always hold the true bytes,
as ONNX Runtime may read it even where the values were given to it otherwise.
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
"""Optimisers that make new weights of old ones, which no file has: of a layer and the scale and
shift behind it, as SubnetNorm has them; of the three products of an attention; turned ones; those
that come in parts."""
_RUN_ON_FILE: Final = (
    ("session.use_external_initializer_file_buffers_directly", "1"),
    ("session.disable_prepacking", "1"),
    ("optimization.disable_specified_optimizers", ";".join(_MAKE_WEIGHTS)),
)
_folder: ContextVar[Path | None] = ContextVar("_folder", default=None)


class WeightForm(StrEnum):
    """How a session has its weights in memory."""

    PACKED = "packed"
    """As its kernels like them best, in copies of its own."""
    SHARED = "shared"
    """As they are in the file, which all sessions map; those that are in the graph are private."""


@contextmanager
def weights_in(folder: Path) -> Iterator[None]:
    """Have graphs that are loaded meanwhile, in this context, find named weights in a folder."""
    token = _folder.set(folder)
    try:
        yield
    finally:
        _folder.reset(token)


@contextmanager
def graphs_of(bundle: Bundle) -> Iterator[Callable[[str], bytes]]:
    """Give what reads a bundle's graphs, by file, as sessions of this context take them.

    They name their weights, which ONNX Runtime maps. Where it cannot find them they have all in
    them, as other runtimes need them: of 2 GiB at most then. Errors as of :meth:`.Bundle.read`.
    """
    folder = bundle.weight_folder()
    if folder is None or not is_text(folder):
        yield bundle.read
        return
    with weights_in(folder):
        yield bundle.graph


def is_text(folder: Path) -> bool:
    """Whether ONNX Runtime's settings can hold the name of a folder: names may be no UTF-8."""
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        return False
    return True


def weight_folder() -> Path | None:
    """Give the folder of :func:`weights_in`; ``None`` outside of it."""
    return _folder.get()


def name_weights(options: Any, folder: Path | None = None) -> None:
    """Tell the options of a session of ONNX Runtime where named weights are, if anywhere.

    Without ``folder`` it is that of :func:`weights_in`.
    """
    folder = folder or _folder.get()
    if folder is not None:
        options.add_session_config_entry(_FOLDER_KEY, str(folder))


def run_on_file(options: Any) -> None:
    """Have a session of ONNX Runtime run on the weights that it maps, and make no others of them.

    Blocked layouts of convolutions have to be off beside it: their weights are always copies.
    """
    for key, value in _RUN_ON_FILE:
        options.add_session_config_entry(key, value)
