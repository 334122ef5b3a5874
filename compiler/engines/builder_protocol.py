"""Protocol of engine builders, implemented by TensorRT's builder and by a fake one for tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from numpy.typing import NDArray

from offramp.bundle.engines import ShapeProfile
from offramp.compiler.engines.build_options import BuildSettings

BuildProgress: TypeAlias = Callable[[str, int, int], None]
"""Callback with the name of a phase, its steps done, and its number of steps."""


class Built(NamedTuple):
    """An engine that a builder made."""

    plan: bytes
    """The engine, serialised by TensorRT."""
    timing_cache: bytes
    """Timing cache for the next build on the same device."""


class TimedEngine(NamedTuple):
    """An engine to be timed: its plan, and its inputs."""

    plan: bytes
    inputs: Mapping[str, NDArray[Any]]
    profile: int
    """Index of an optimisation profile that includes the shapes of the inputs."""


class EngineBuilder(Protocol):
    """Protocol of an object that builds engines on one device, and runs them."""

    gpu: str
    """Name of the GPU in the driver."""
    compute_capability: tuple[int, int]
    """Major and minor compute capability."""
    version: str
    """TensorRT's version."""

    # The protocol repeats the signature that it requires of TensorRT's builder and the fake.
    def build(
        self,
        graph: bytes,
        profiles: Sequence[ShapeProfile],
        settings: BuildSettings,
        *,
        timing_cache: bytes,
        progress: BuildProgress,
    ) -> Built:
        """Build the engine of an ONNX graph, with an optimisation profile for each of ``profiles``.

        EngineBuildError, with TensorRT's own errors, if the build fails; the caller adds the unit's
        name.
        """
        ...

    def run(
        self, plan: bytes, inputs: Mapping[str, NDArray[Any]], profile: int
    ) -> dict[str, NDArray[Any]]:
        """Run an engine from :meth:`build` once on the device.

        ``profile`` is the index of the profile that includes the shapes of the inputs. Inputs and
        outputs are arrays by name, with the types in the graph. EngineBuildError if the engine
        cannot be loaded or run.
        """
        ...

    def time(self, plans: Sequence[TimedEngine], *, rounds: int) -> list[float]:
        """Return times of engines from :meth:`build`, in seconds on the device.

        Each time is the median over the rounds. In a round all engines run once, one after the
        other. EngineBuildError if an engine cannot be loaded or run.
        """
        ...

    def close(self) -> None:
        """Release the device; no other method may be called afterwards."""
        ...
