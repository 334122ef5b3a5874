"""Offramp: make multi-exit models of ONNX models, and serve them.

::

    bundle = offramp.compile("resnet.onnx", "calibration.npz")  # or a torch module, a DataLoader
    with offramp.load(bundle.path) as model:
        logits = model(images)

The subpackages follow the data: :mod:`offramp.compiler` (with
:mod:`offramp.calibration`) writes a :mod:`offramp.bundle`, which
:mod:`offramp.engine` executes, :mod:`offramp.server` serves and
:mod:`offramp.client` calls; :mod:`offramp.api` has the functions above.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offramp.api.compiling import compile  # noqa: A004
    from offramp.api.models import AsyncModel, Model, load
    from offramp.api.serving import serve
    from offramp.bundle import Bundle

    __version__: str

# ONNX Runtime 1.31 and later report to its makers how it is used, unless this is set before it is
# imported. A server of other people's models asks first: whoever wants that sets it to 0.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__all__ = ["AsyncModel", "Bundle", "Model", "__version__", "compile", "load", "serve"]
_MODULES = {
    "AsyncModel": "offramp.api.models",
    "Bundle": "offramp.bundle",
    "Model": "offramp.api.models",
    "compile": "offramp.api.compiling",
    "load": "offramp.api.models",
    "serve": "offramp.api.serving",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for: ``import offramp`` alone imports nothing large."""
    if name == "__version__":
        return _version()
    if name not in _MODULES:
        raise AttributeError(f"module 'offramp' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415

    try:
        return version("offramp")
    except PackageNotFoundError:  # a source tree that was never installed
        return "0.0.0+source"
