"""Offramp: make multi-exit models of ONNX models, and serve them.

The subpackages follow the data: :mod:`offramp.compiler` (with
:mod:`offramp.calibration`) writes a :mod:`offramp.bundle`, which
:mod:`offramp.engine` executes, :mod:`offramp.server` serves and
:mod:`offramp.client` calls.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("offramp")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0+source"

__all__ = ["__version__"]
