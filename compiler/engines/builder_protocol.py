"""Protocol of engine builders, which TensorRT's builder and the tests' fake one implement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from numpy.typing import NDArray

from offramp.bundle.engines import ShapeProfile
from offramp.compiler.engines.build_options import BuildSettings

BuildProgress: TypeAlias = Callable[[str, int, int], None]
"""Callback with the name of a phase, its steps done, and its number of steps."""


class Built(NamedTuple):
    """An engine from a builder."""

    plan: bytes
    """Serialised engine."""
    timing_cache: bytes
    """Timing cache for the next build on the same device."""


class TimedEngine(NamedTuple):
    """An engine to be timed: its plan, and its inputs."""

    plan: bytes
    inputs: Mapping[str, NDArray[Any]]
    profile: int
    """Index of a profile that includes the inputs' shapes."""


class EngineBuilder(Protocol):
    """Builds engines on one device, and runs them."""

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

        EngineBuildError, with TensorRT's own errors, if it refuses; the caller adds the unit's
        name.
        """
        ...

    def run(
        self, plan: bytes, inputs: Mapping[str, NDArray[Any]], profile: int
    ) -> dict[str, NDArray[Any]]:
        """Run an engine from :meth:`build` once on the device.

        ``profile`` is the index of the profile that includes these shapes. Inputs and outputs are
        by name, with the graph's types. EngineBuildError if the engine cannot be loaded or run.
        """
        ...

    def time(self, plans: Sequence[TimedEngine], *, rounds: int) -> list[float]:
        """Return times of engines from :meth:`build`, in seconds on the device.

        They are medians of rounds; in each, all engines run once, one after the other.
        EngineBuildError if an engine cannot be loaded or run.
        """
        ...

    def close(self) -> None:
        """Release the device; no other method may be called afterwards."""
        ...
