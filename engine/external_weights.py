"""Weights that several graphs share in one file, while a model is compiled.

A graph may name a file for its weights instead of holding them (ONNX's external data). ONNX Runtime
maps them from there, so that sessions beside each other do not hold a copy each of what they do not
pack anew. Served graphs hold theirs: a name in a file from elsewhere must lead nowhere.
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


def name_weights(options: Any) -> None:
    """Tell the options of a session of ONNX Runtime where named weights are, if anywhere."""
    folder = _folder.get()
    if folder is not None:
        options.add_session_config_entry(_FOLDER_KEY, str(folder))
