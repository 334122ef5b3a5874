"""Offramp: make multi-exit models of ONNX models, and serve them.

The subpackages follow the data: :mod:`offramp.compiler` (with
:mod:`offramp.calibration`) writes a :mod:`offramp.bundle`, which
:mod:`offramp.engine` executes, :mod:`offramp.server` serves and
:mod:`offramp.client` calls.
"""

__version__: str
__all__ = ["__version__"]


def __getattr__(name: str) -> str:
    """Look the version up when it is asked for: that takes longer than all else a start does."""
    if name != "__version__":
        raise AttributeError(f"module 'offramp' has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415

    try:
        return version("offramp")
    except PackageNotFoundError:  # a source tree that was never installed
        return "0.0.0+source"
