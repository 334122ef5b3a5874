"""What builds engines: the protocol that TensorRT's builder and the tests' fake one follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from numpy.typing import NDArray

from offramp.bundle.engines import ShapeProfile
from offramp.compiler.engines.build_options import BuildSettings

BuildProgress: TypeAlias = Callable[[str, int, int], None]
"""Called with the name of a phase, its steps done, and its steps in all."""


class Built(NamedTuple):
    """An engine as a builder gives it."""

    plan: bytes
    """The engine, serialised."""
    timing_cache: bytes
    """For the next build on the same device."""


class TimedEngine(NamedTuple):
    """An engine that is to be timed: its plan, and what it is run on."""

    plan: bytes
    inputs: Mapping[str, NDArray[Any]]
    profile: int
    """The index of one that holds the inputs' shapes."""


class EngineBuilder(Protocol):
    """Builds engines on one device, and tries them."""

    gpu: str
    """The GPU's name, as the driver gives it."""
    compute_capability: tuple[int, int]
    """Major and minor."""
    version: str
    """TensorRT's."""

    # A protocol repeats the signature that it asks for; TensorRT's builder and the fake have it.
    def build(
        self,
        graph: bytes,
        profiles: Sequence[ShapeProfile],
        settings: BuildSettings,
        *,
        timing_cache: bytes,
        progress: BuildProgress,
    ) -> Built:
        """Build the engine of an ONNX graph, with one optimisation profile for each given.

        EngineBuildError, with TensorRT's own errors, if it refuses; the caller adds the unit.
        """
        ...

    def run(
        self, plan: bytes, inputs: Mapping[str, NDArray[Any]], profile: int
    ) -> dict[str, NDArray[Any]]:
        """Run an engine, as :meth:`build` gave it, once on the device.

        ``profile`` is the index of the one that holds these shapes. Inputs and outputs are by name,
        with the graph's types. EngineBuildError if it cannot be loaded or run.
        """
        ...

    def time(self, plans: Sequence[TimedEngine], *, rounds: int) -> list[float]:
        """Time engines, as :meth:`build` gave them: seconds on the device for each.

        They are medians of rounds in which all run once, one after the other. EngineBuildError if
        one cannot be loaded or run.
        """
        ...

    def close(self) -> None:
        """Release the device; nothing else may be called then."""
        ...
