"""Weights that several graphs share in one file: a bundle's, or a model's while it is compiled.

A graph may name a file for its weights instead of holding them (ONNX's external data). ONNX Runtime
maps them from there: sessions beside each other do not hold a copy each of what they do not pack
anew, and none parses weights out of the graph, which took more memory than the weights themselves.

A name in a file from elsewhere must lead nowhere: a bundle's graphs are looked at before a session
is made of them (:mod:`offramp.bundle.graph_weights`). And the file must always hold the true bytes,
as ONNX Runtime may read it even where the values were given to it otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final

_FOLDER_KEY: Final = "session.model_external_initializers_file_folder_path"
_folder: ContextVar[Path | None] = ContextVar("_folder", default=None)


@contextmanager
def weights_in(folder: Path) -> Iterator[None]:
    """Have graphs that are loaded meanwhile, in this context, find named weights in a folder."""
    token = _folder.set(folder)
    try:
        yield
    finally:
        _folder.reset(token)


def name_weights(options: Any, folder: Path | None = None) -> None:
    """Tell the options of a session of ONNX Runtime where named weights are, if anywhere.

    Without ``folder`` it is that of :func:`weights_in`.
    """
    folder = folder or _folder.get()
    if folder is not None:
        options.add_session_config_entry(_FOLDER_KEY, str(folder))
