"""Systems of E3's evaluation on emulated devices: the real router, wire and worker processes.

Workers answer from a script and sleep for the device's times (:mod:`.testing.emulated_worker`). All
times are stretched, so that a machine of two cores carries many devices: the router's own time is
included, and its share falls with the stretching.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import uvloop
from benchmarks.e3_systems import MOST_WAITING, System, behaviour_of, points_of
from benchmarks.replay import COUNTED, Replay
from numpy.typing import NDArray
from rich.table import Table

from offramp.bundle import Answer, ExitPolicy, TensorSpec
from offramp.bundle.schema.parts import Variant
from offramp.certify.decision import MODEL_END
from offramp.cluster.planning.cluster import Cluster
from offramp.cluster.remote.launching import LocalLauncher
from offramp.cluster.remote.process import WorkerCommand
from offramp.cluster.remote.worker_backend import RemoteBackend
from offramp.engine.core import Engine
from offramp.engine.models.deployment import Deployment
from offramp.engine.models.options import ModelOptions
from offramp.engine.models.served_model import ServedModel
from offramp.engine.scheduling import DeviceLink, Placement
from offramp.engine.scheduling.parallel import ParallelLimit
from offramp.engine.scheduling.policies import PolicyName, make_scheduler
from offramp.engine.stages.pipeline import Pipeline
from offramp.engine.stages.plan import Mode, Plan, StageSpec
from offramp.testing.backend import SCRIPT
from offramp.testing.emulated_worker import MODULE, EmulatedDevice
from offramp.testing.scripted_worker import ScriptedBackend
from offramp.tools.bench.common.output import wide_console, write_json

MODEL: Final = "emulated"
SURE: Final = 0.9
THRESHOLD: Final = 0.75
_CLASSES: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedCluster:
    """Worker processes that take the times of a cluster's devices, multiplied by a factor."""

    backend: RemoteBackend
    stretch: float
    slowdowns: tuple[Path, ...]
    """[workers]: file with the slowdown factor of each worker."""

    def slow_down(self, slower: Mapping[int, float] | None = None) -> None:
        """Set slowdown factors by number of the worker, from now on; other workers get 1."""
        for number, path in enumerate(self.slowdowns):
            path.write_text(str((slower or {}).get(number, 1.0)))


@contextmanager
def emulated_cluster(
    cluster: Cluster, *, row_bytes: float, stretch: float
) -> Iterator[EmulatedCluster]:
    """Start a worker for each device of a cluster; they end with the context."""
    kinds = {kind.name: kind for kind in cluster.types}
    devices = [
        EmulatedDevice(
            segments_s=stretched(kinds[name].times.segments_s, stretch),
            exits_s=stretched(kinds[name].times.exits_s, stretch),
            link_s=stretch * cluster.link.latency_s,
            row_s=stretch * row_bytes / cluster.link.bytes_per_s,
        )
        for name in cluster.device_types
    ]
    with emulated_workers(devices, stretch=stretch) as found:
        yield found


@contextmanager
def emulated_workers(
    devices: Sequence[EmulatedDevice], *, stretch: float
) -> Iterator[EmulatedCluster]:
    """Start a worker for each device, with stretched times; they end with the context."""
    with tempfile.TemporaryDirectory() as folder:
        launchers, slowdowns = [], []
        for number, device in enumerate(devices):
            slowdowns.append(Path(folder) / f"{number}.slowdown")
            path = Path(folder) / f"{number}.json"
            replace(device, slowdown=str(slowdowns[-1])).write(path)
            command = WorkerCommand(
                module=MODULE, arguments=("--device", str(path), "--number", str(number))
            )
            launchers.append(LocalLauncher(command))
        backend = RemoteBackend(ScriptedBackend(), launchers=launchers, least_s=60.0)
        found = EmulatedCluster(backend=backend, stretch=stretch, slowdowns=tuple(slowdowns))
        found.slow_down()
        try:
            yield found
        finally:
            backend.close()


def goodput_emulated(
    emulated: EmulatedCluster,
    system: System,
    depths: NDArray[np.int64],
    *,
    slo_s: float,
    under_way: int,
    duration_s: float,
    batches_per_worker: int = 1,
) -> float:
    """Serve closed-loop clients by a system; return the rows per second in time (E3 5).

    All times, including the returned rate, are those of the devices, not stretched.
    """
    stretch = emulated.stretch

    async def serve() -> float:
        model = _served(emulated, system, batches_per_worker)
        streams = batches_per_worker * len(system.placement.streams)
        engine = Engine({MODEL: model}, emulated.backend, streams=streams)
        try:
            answers = np.zeros(len(depths), np.int64)
            replay = Replay(engine, MODEL, samples_of(system, depths), answers)
            took_s = await replay.saturate(under_way, stretch * duration_s)
        finally:
            await engine.close()
        in_time = np.count_nonzero(took_s <= stretch * slo_s)
        return in_time / (COUNTED * duration_s)

    return uvloop.run(serve())


def stretched(times: NDArray[np.float64], stretch: float) -> tuple[tuple[float, ...], ...]:
    """Return a table of seconds, multiplied by a factor."""
    return tuple(tuple(row) for row in (stretch * times).tolist())


def _slower(placement: Placement, stretch: float, batches: int) -> Placement:
    """Stretch all times, and set the number of streams of each device."""

    def link(given: DeviceLink) -> DeviceLink:
        return DeviceLink(
            bytes_per_s=given.bytes_per_s / stretch, latency_s=given.latency_s * stretch
        )

    return replace(
        placement,
        streams=placement.streams * batches,
        kinds=tuple(
            replace(kind, seconds=stretched(np.array(kind.seconds), stretch))
            for kind in placement.kinds
        ),
        link=link(placement.link),
        links=tuple((a, b, link(given)) for a, b, given in placement.links),
    )


def samples_of(system: System, depths: NDArray[np.int64]) -> list[dict[str, NDArray[Any]]]:
    """Return the script of each row: it is confident from the stage where it leaves."""
    leaves_at = behaviour_of(system, depths).leaves_at
    last = system.spans[-1][1]
    samples = []
    for stage in leaves_at.tolist():
        sure = np.full(last + 2, 0.5, np.float32)
        sure[system.spans[stage][1] : last + 1] = SURE
        sure[last + 1] = 0
        samples.append({SCRIPT: np.stack([sure, 1 - sure], axis=-1)[None]})
    return samples


def plan_of(system: System) -> Plan:
    """Make the stages of a system, which answer by script."""
    stages = tuple(
        StageSpec(
            index=index,
            first_segment=first,
            last_segment=last,
            exit=exit_,
            load=bytes,
            inputs=(SCRIPT,),
            carried=() if exit_ == MODEL_END else (SCRIPT,),
            answer=None if exit_ is None else "answer",
            form="probabilities",
            threshold=0.0 if exit_ == MODEL_END else THRESHOLD,
        )
        for index, (first, last, exit_) in enumerate(system.spans)
    )
    return Plan(stages=stages, policy_version=1, mode=Mode.LEAVE)


def _served(emulated: EmulatedCluster, system: System, batches: int) -> ServedModel:
    placement = system.placement
    emulated.backend.hold(lambda n, spec: spec.index in placement.streams[n].holds)
    stretched = _slower(placement, emulated.stretch, batches)
    deployment = Deployment(
        number=0,
        policy=ExitPolicy(version=1, active=()),
        pipeline=Pipeline(emulated.backend, plan_of(system)),
        points=points_of(system, stretched),
        batch_size=system.batch_size,
        placement=stretched,
    )
    return scripted_model(
        deployment, system.policy, streams=len(stretched.streams), most_waiting=MOST_WAITING
    )


def scripted_model(
    deployment: Deployment,
    policy: str,
    *,
    streams: int,
    most_waiting: int,
    variants: Sequence[Variant] = (),
    parallel: ParallelLimit | None = None,
) -> ServedModel:
    """Return a model that answers from a script, with the stages of a deployment.

    Its one input is float32[rows, positions, 2]: a position for each segment, and one more for the
    mark of the worker that had the row last.
    """
    positions = max(stage.last_segment for stage in deployment.pipeline.plan.stages) + 2
    chosen = PolicyName.parse(policy)
    shape = (positions, _CLASSES)
    return ServedModel(
        inputs=(TensorSpec(name=SCRIPT, dtype="float32", shape=("batch", *shape)),),
        outputs=(TensorSpec(name="answer", dtype="float32", shape=("batch", _CLASSES)),),
        answer=Answer(output="answer", classes=_CLASSES, form="probabilities"),
        mode=Mode.LEAVE,
        options=ModelOptions(
            max_batch_size=deployment.batch_size,
            scheduling=chosen,
            max_queue_samples=most_waiting,
        ),
        deployment=deployment,
        scheduler=make_scheduler(
            chosen,
            deployment.points,
            max_batch_size=deployment.batch_size,
            max_queue=most_waiting,
            streams=streams,
            placement=deployment.placement,
            parallel=parallel,
        ),
        good_inputs={SCRIPT: np.zeros((1, *shape), np.float32)},
        variants=tuple(variants),
    )


def show_emulated(name: str, rows: Sequence[Mapping[str, Any]], *, digits: int, width: int) -> None:
    """Print the measurements of an experiment."""
    table = Table(*rows[0], title=f"MEASURED ON EMULATED DEVICES: {name}")
    for row in rows:
        values = (f"{v:,.{digits}f}" if isinstance(v, float) else str(v) for v in row.values())
        table.add_row(*values)
    wide_console(width).print(table)


def write_emulated(
    path: Path | None, doc: str | None, experiments: Mapping[str, Any], **others: Any
) -> None:
    """Write experiments as JSON; ``doc`` has their assumptions, after the command."""
    assumptions = " ".join((doc or "").split("FILE]")[1].split())
    write_json(path, {"assumptions": assumptions, "experiments": experiments, **others})
