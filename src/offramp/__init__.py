"""Offramp: make multi-exit models of ONNX models, and serve them.

::

    with offramp.load("resnet.ee") as model:
        logits = model(images)

The subpackages follow the data: :mod:`offramp.compiler` (with
:mod:`offramp.calibration`) writes a :mod:`offramp.bundle`, which
:mod:`offramp.engine` executes, :mod:`offramp.server` serves and
:mod:`offramp.client` calls; :mod:`offramp.api` has the functions above.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offramp.api import AsyncModel, Model, load
    from offramp.bundle import Bundle

    __version__: str

__all__ = ["AsyncModel", "Bundle", "Model", "__version__", "load"]


def __getattr__(name: str) -> Any:
    """Import what is asked for: ``import offramp`` alone imports nothing large."""
    if name == "__version__":
        return _version()
    if name not in __all__:
        raise AttributeError(f"module 'offramp' has no attribute {name!r}")
    if name == "Bundle":
        from offramp.bundle import Bundle  # noqa: PLC0415

        return Bundle
    from offramp import api  # noqa: PLC0415

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415

    try:
        return version("offramp")
    except PackageNotFoundError:  # a source tree that was never installed
        return "0.0.0+source"
