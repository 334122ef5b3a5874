"""What builds engines: the protocol that TensorRT's builder and the tests' fake one follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

from numpy.typing import NDArray

from offramp.bundle.engines import Precision, ShapeProfile

BuildProgress: TypeAlias = Callable[[str, int, int], None]
"""Called with the name of a phase, its steps done, and its steps in all."""

OPTIMIZATION_LEVELS = range(6)
"""TensorRT's: from building fast to running fast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSettings:
    """How an engine is built."""

    precision: Precision
    """It is in the graph already; here it says which arithmetic TensorRT may choose from."""
    workspace_bytes: int | None = None
    """Most device memory for scratch; ``None`` is all that is free."""
    optimization_level: int = 3
    """0 to 5: how long TensorRT looks for a faster engine."""

    def __post_init__(self) -> None:
        """Refuse what TensorRT would."""
        if self.optimization_level not in OPTIMIZATION_LEVELS:
            raise ValueError(f"optimization level {self.optimization_level} is not in 0 to 5")
        if self.workspace_bytes is not None and self.workspace_bytes < 1:
            raise ValueError(f"workspace of {self.workspace_bytes} bytes is not positive")


class Built(NamedTuple):
    """What a build gives."""

    plan: bytes
    """The engine, serialised."""
    timing_cache: bytes
    """For the next build on the same device."""


class EngineBuilder(Protocol):
    """Builds engines on one device, and tries them."""

    @property
    def gpu(self) -> str:
        """As the driver names it."""
        ...

    @property
    def compute_capability(self) -> tuple[int, int]:
        """Major and minor."""
        ...

    @property
    def version(self) -> str:
        """TensorRT's."""
        ...

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

        Raises:
            EngineBuildError: TensorRT refuses; the message has its own errors. The caller adds
                which unit it is.
        """
        ...

    def run(
        self, plan: bytes, inputs: Mapping[str, NDArray[Any]], profile: int
    ) -> dict[str, NDArray[Any]]:
        """Run an engine once on the device.

        Args:
            plan: What :meth:`build` gave.
            inputs: By name, with the graph's types.
            profile: Index of the profile to run with, which holds these shapes.

        Returns:
            All outputs by name, with the graph's types.

        Raises:
            EngineBuildError: It cannot be loaded or run.
        """
        ...

    def close(self) -> None:
        """Release the device; nothing else may be called then."""
        ...
