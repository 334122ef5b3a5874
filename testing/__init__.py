"""Fakes of all external parts, for Offramp's own tests and for tests of its users.

::

    FakeServer    a server in the test's own process: real gRPC, a fake engine   server, engine
    FakeEngine    an engine without models, which tests can control              engine
    FakeBackend   a backend without a model, which answers from a script         backend
    worker        a worker process without a model, with requested faults        scripted_worker
    FakeDriver    a CUDA driver without a GPU, which detects misuse              cuda_driver, cuda_*

Each name is imported from its module on first use, so that the fake backend does not need gRPC.
docs/testing.md has examples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offramp.testing.backend import SCRIPT, FakeBackend, FakeSlot
    from offramp.testing.cuda_driver import FakeDriver, MisuseError
    from offramp.testing.engine import FakeEngine, fake_control, fake_model
    from offramp.testing.server import FakeServer

__all__ = [
    "SCRIPT",
    "FakeBackend",
    "FakeDriver",
    "FakeEngine",
    "FakeServer",
    "FakeSlot",
    "MisuseError",
    "fake_control",
    "fake_model",
]


def __getattr__(name: str) -> Any:
    module: Any
    match name:
        case "SCRIPT" | "FakeBackend" | "FakeSlot":
            from offramp.testing import backend as module  # noqa: PLC0415
        case "FakeDriver" | "MisuseError":
            from offramp.testing import cuda_driver as module  # noqa: PLC0415
        case "FakeEngine" | "fake_control" | "fake_model":
            from offramp.testing import engine as module  # noqa: PLC0415
        case "FakeServer":
            from offramp.testing import server as module  # noqa: PLC0415
        case _:
            raise AttributeError(f"offramp.testing has no {name!r}; it has {', '.join(__all__)}")
    return getattr(module, name)
