"""The backend of TensorRT: engines run the stages of a bundle on a GPU.

A stage is run by one engine, or by its segments' engines one after the other
(:mod:`offramp.engine.tensorrt.lookup`). In a slot each engine has a context for every profile, so
that nothing is allocated while serving. All contexts of a slot share its one scratch memory,
because they run in order on its stream.

A CUDA graph is valid only while the context that it was captured from is unchanged. So every graph
has its own contexts, which never change and are released with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from offramp.bundle import Bundle
from offramp.bundle.engines import Precision
from offramp.engine.common.errors import BackendError
from offramp.engine.cuda.driver import Driver, Stream
from offramp.engine.cuda.executable import Shape, SlotResources, TensorInfo
from offramp.engine.stages.backend_protocol import MissingEngine
from offramp.engine.stages.plan import StageSpec
from offramp.engine.tensorrt import compat
from offramp.engine.tensorrt.loading import EngineContext, EngineLibrary, LoadedEngine, SharedEngine
from offramp.engine.tensorrt.lookup import EnginePlace, as_computed, find_engines, missing_engine
from offramp.engine.tensorrt.scratch_layout import ScratchLayout

_MOST_SHAPES = 4096
"""Largest number of known shapes of an engine in a slot; inputs of variable length have unlimited
shapes."""


class TensorRTFactory:
    """Prepares stages as engines: an :class:`offramp.engine.cuda.executable.ExecutableFactory`.

    Engines have ``precision``, or the lowest that a bundle has. With ``graphs``, stages can be
    captured into CUDA graphs. Call :func:`offramp.engine.tensorrt.probe.require` and
    :func:`offramp.engine.tensorrt.compat.load` first.
    """

    name = "tensorrt"

    def __init__(
        self,
        driver: Driver,
        device: str = "cuda:0",
        *,
        precision: Precision | None = None,
        graphs: bool = True,
    ) -> None:
        self._driver = driver
        self._library = EngineLibrary(driver)
        self._is_old = compat.major() < 10
        self._graphs = graphs
        self._place = EnginePlace(
            gpu=driver.device,
            compute_capability=driver.compute_capability,
            tensorrt=compat.version(),
            device=device,
            precision=precision,
        )

    def device_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """Return the type that TensorRT computes with: it has no float64, and 8.6 no int64."""
        if dtype == np.float64:
            return np.dtype(np.float32)
        if dtype == np.int64 and self._is_old:
            return np.dtype(np.int32)
        return dtype

    def as_computed(self, bundle: Bundle) -> Bundle:
        """Return a bundle with the results that were certified in its engines' precision."""
        return as_computed(bundle, self._place)

    def prepare(self, spec: StageSpec) -> TensorRTStage:
        """Load the engines of a stage; a BackendError has the remedy.

        It is raised if the bundle has no engine for this GPU, TensorRT and model, or if TensorRT
        cannot load one.
        """
        with ExitStack() as releases:
            engines, found = [], find_engines(spec, self._place)
            for each in found:
                engines.append(self._library.take(each))
                releases.callback(engines[-1].give_back)
            stage = TensorRTStage(
                spec,
                engines,
                capturable=self._graphs,
                remedy=self._remedy(spec),
                missing=missing_engine(spec, self._place, found),
            )
            releases.pop_all()
        return stage

    def close(self) -> None:
        """Check that all engines were returned to the library."""
        self._library.close()

    def _remedy(self, spec: StageSpec) -> str:
        return self._place.remedy(spec.bundle.path) if spec.bundle else ""


class TensorRTStage:
    """A chain of engines: a :class:`offramp.engine.cuda.executable.PreparedStage`.

    The engines were taken from the library; :meth:`close` returns them. ``remedy`` is the command
    that builds them again, for messages. BackendError if they do not compute the stage.
    """

    def __init__(
        self,
        spec: StageSpec,
        taken: Sequence[SharedEngine],
        *,
        capturable: bool,
        remedy: str,
        missing: MissingEngine | None = None,
    ) -> None:
        self.spec = spec
        self.missing = missing
        """The single engine that would replace the chain; ``None`` if it is built."""
        self.capturable = capturable
        """``True`` if capture into a CUDA graph is possible; the first attempt may still fail."""
        self.pads = capturable
        """``True`` if batches are padded: every new size needs a graph and new contexts of all
        engines, which are slow to make."""
        self.remedy = remedy
        self._taken = taken
        engines = [each.engine for each in taken]
        wanted = [n for n in (spec.answer, spec.confidence, *spec.carried) if n is not None]
        last = engines[-1]
        self.outputs = tuple(_info(last, name) for name in wanted if name in last.outputs)
        """Outputs of the last engine that the stage returns."""
        self.inputs = _outer_inputs(engines)
        """Inputs of all engines that no engine of the chain computes."""
        self._check(wanted)
        self.max_rows = min(engine.max_rows for engine in engines)
        self.layout = ScratchLayout(engines, {info.name for info in self.outputs})
        self.scratch_bytes = self.layout.size_bytes
        """Scratch memory of TensorRT, and of tensors between the engines of a chain, in bytes."""

    def padding_limit(self, rows: int) -> int:
        """Return the largest batch size that the profiles for ``rows`` allow.

        The profiles may not allow the next padded size.
        """
        ends = [
            next((p.last_batch for p in each.engine.entry.profiles if p.takes(rows)), rows)
            for each in self._taken
        ]
        return min(ends)

    def open(self, slot: SlotResources) -> TensorRTRun:
        """Make the contexts of a slot."""
        if slot.scratch_bytes < self.scratch_bytes:
            raise BackendError(
                f"stage {self.spec.index} needs {self.scratch_bytes} bytes of scratch memory, but "
                f"the slot has {slot.scratch_bytes}"
            )
        return TensorRTRun(self, self._taken, slot)

    def close(self) -> None:
        """Return the engines to the library; may be called again."""
        taken, self._taken = self._taken, ()
        for each in taken:
            each.give_back()

    def _check(self, wanted: Sequence[str]) -> None:
        given = {info.name for info in self.outputs}
        through = {info.name for info in self.inputs} | set(self.spec.inputs)
        passed = set(self.spec.carried) - set(self.spec.given)
        lacking = [n for n in wanted if n not in given and n not in passed]
        foreign = through - set(self.spec.inputs) - set(self._graph_inputs())
        if lacking or foreign:
            names = ", ".join([*lacking, *sorted(foreign)])
            raise BackendError(
                f"the engines of stage {self.spec.index} do not fit this model, see {names}; "
                f"{self.remedy}"
            )

    def _graph_inputs(self) -> tuple[str, ...]:
        bundle = self.spec.bundle
        return tuple(tensor.name for tensor in bundle.manifest.inputs) if bundle else ()


class TensorRTRun:
    """A stage in a slot: an :class:`offramp.engine.cuda.executable.Executable`.

    It has a context for every engine and profile; TensorRT may refuse these when memory is short.
    """

    def __init__(
        self, stage: TensorRTStage, taken: Sequence[SharedEngine], slot: SlotResources
    ) -> None:
        self._stage = stage
        self._inner = stage.layout.addresses(slot.scratch_address)
        with ExitStack() as releases:
            self._links = []
            for each in taken:
                self._links.append(_Link(each, slot, stage.layout.engine_bytes))
                releases.callback(self._links[-1].close)
            releases.pop_all()

    def output_shapes(self, inputs: Mapping[str, Shape]) -> Mapping[str, Shape]:
        """Return the shapes of the outputs, computed through all engines."""
        known: dict[str, Shape] = dict(inputs)
        for link in self._links:
            known |= self._shapes(link, known)
        return {info.name: known[info.name] for info in self._stage.outputs}

    def enqueue(
        self,
        inputs: Mapping[str, Shape],
        addresses: Mapping[str, int],
        stream: Stream,
        *,
        graph: int | None = None,
    ) -> None:
        """Enqueue one engine after the other."""
        known: dict[str, Shape] = dict(inputs)
        try:
            for link, inner in zip(self._links, self._inner, strict=True):
                known |= self._shapes(link, known)
                link.enqueue(known, {**addresses, **inner}, stream, graph)
        except BackendError as error:
            raise BackendError(f"stage {self._stage.spec.index} failed: {error}") from error

    def forget(self, graph: int) -> None:
        """Release the contexts that a graph was captured from."""
        for link in self._links:
            link.forget(graph)

    def close(self) -> None:
        """Release the contexts."""
        for link in self._links:
            link.close()

    def _shapes(self, link: _Link, inputs: Mapping[str, Shape]) -> Mapping[str, Shape]:
        found = link.output_shapes(inputs)
        if found is None:
            sizes = ", ".join(f"{n} {list(inputs[n])}" for n in link.engine.inputs)
            takes = "; ".join(link.takes())
            raise BackendError(
                f"stage {self._stage.spec.index}: no profile of engine {link.engine.entry.unit} "
                f"includes {sizes}; it takes {takes}; use --batch-profiles or --buckets and "
                f"{self._stage.remedy}"
            )
        return found


class _Link:
    """One engine in a slot: a context for each profile, and for each graph."""

    def __init__(self, shared: SharedEngine, slot: SlotResources, scratch_bytes: int) -> None:
        self._slot = slot
        self._scratch_bytes = scratch_bytes
        self._known: dict[tuple[Shape, ...], tuple[int, Mapping[str, Shape]]] = {}
        """Profile and shapes of the outputs, by shapes of the inputs."""
        self._kept: dict[int, EngineContext] = {}
        """Contexts by graph; each is used with that graph's shapes and addresses only."""
        self.engine = shared.engine
        self._contexts: list[EngineContext] = []
        try:
            for profile in range(len(self.engine.entry.profiles)):
                self._contexts.append(self._context(profile))
        except BaseException:
            self.close()
            raise

    def output_shapes(self, inputs: Mapping[str, Shape]) -> Mapping[str, Shape] | None:
        """Return the shapes of the outputs; ``None`` if no profile holds the inputs."""
        found = self._find(inputs)
        return None if found is None else found[1]

    def enqueue(
        self,
        inputs: Mapping[str, Shape],
        addresses: Mapping[str, int],
        stream: Stream,
        graph: int | None,
    ) -> None:
        found = self._find(inputs)
        assert found is not None, "output_shapes was asked before"
        profile = found[0]
        context = self._contexts[profile] if graph is None else self._of(graph, profile)
        context.take_shapes(inputs)
        context.enqueue(addresses, stream)

    def forget(self, graph: int) -> None:
        context = self._kept.pop(graph, None)
        if context is not None:
            context.close()

    def takes(self) -> list[str]:
        """Describe the input ranges of the profiles, for messages."""
        return [
            ", ".join(f"{n} {list(r.least)} to {list(r.most)}" for n, r in profile.inputs.items())
            for profile in self.engine.entry.profiles
        ]

    def close(self) -> None:
        """Release the contexts; may be called again."""
        for context in (*self._kept.values(), *self._contexts):
            context.close()
        self._kept.clear()
        self._contexts.clear()

    def _of(self, graph: int, profile: int) -> EngineContext:
        context = self._kept.get(graph)
        if context is None:
            context = self._kept[graph] = self._context(profile)
        return context

    def _context(self, profile: int) -> EngineContext:
        context = self.engine.context(profile, self._slot.driver, self._slot.stream)
        context.give_memory(self._slot.scratch_address, self._scratch_bytes)
        return context

    def _find(self, inputs: Mapping[str, Shape]) -> tuple[int, Mapping[str, Shape]] | None:
        key = tuple(inputs[name] for name in self.engine.inputs)
        found = self._known.get(key)
        if found is None:
            profile = _profile_for(self.engine, inputs)
            if profile is None:
                return None
            shapes = self._contexts[profile].take_shapes(inputs)
            outputs = {name: shapes[name] for name in self.engine.outputs}
            if len(self._known) >= _MOST_SHAPES:
                self._known.clear()
            found = self._known[key] = (profile, outputs)
        return found


def _outer_inputs(engines: Sequence[LoadedEngine]) -> tuple[TensorInfo, ...]:
    given: set[str] = set()
    found: dict[str, TensorInfo] = {}
    for engine in engines:
        for name in engine.inputs:
            if name not in given:
                found.setdefault(name, _info(engine, name))
        given.update(engine.outputs)
    return tuple(found.values())


def _profile_for(engine: LoadedEngine, inputs: Mapping[str, Shape]) -> int | None:
    """Return the first profile that holds the inputs, as ``EngineEntry.profile_for`` does."""
    for index, profile in enumerate(engine.entry.profiles):
        if all(profile.inputs[name].holds(inputs[name]) for name in engine.inputs):
            return index
    return None


def _info(engine: LoadedEngine, name: str) -> TensorInfo:
    return TensorInfo(name=name, dtype=engine.dtypes[name], sample_shape=engine.sample_shape(name))
