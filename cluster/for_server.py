"""Additions of clusters to ``eeserve``: workers, plans, metrics, a section of the status page."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

from jinja2 import Template
from prometheus_client.core import Metric

from offramp.cluster.planning.batch_profile import WINDOW_S
from offramp.cluster.planning.cluster_plan import PlanError
from offramp.cluster.planning.forecasting import LAST, METHODS
from offramp.cluster.serving.cluster_options import NAME, ClusterOptions
from offramp.cluster.serving.cluster_statistics import plan_of, profile_of
from offramp.cluster.serving.cluster_workers import RAY, ray_workers, read_cluster_workers
from offramp.cluster.serving.plan_view import view_plan, view_profile
from offramp.cluster.serving.worker_devices import LocalWorkers, WorkerDevices
from offramp.commands.combinations import Illegal
from offramp.commands.pages import page_template
from offramp.engine.common.errors import BackendError
from offramp.engine.models.options import refuse_unless
from offramp.engine.requests.statistics import ModelStatistics
from offramp.server.arguments.extension import SettingError

_NO_EXIT: Final = "no exit runs in that mode; leave it out, or choose another --mode"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """Settings of the command line and the configuration file."""

    workers: int = 0
    """Number of worker processes that run the stages, each with one stream; 0: the server runs
    stages."""
    cluster: Path | None = None
    """Cluster file whose workers run the stages, or ``ray``."""
    ray_address: str | None = field(default=None, metadata={"key": False})
    """HOST:PORT of the head of Ray's cluster, for the cluster ``ray``."""
    plan: Path | None = None
    """Plan file written by ``eecompile plan --json``; the plan is served unchanged."""
    profile_window_s: float = WINDOW_S
    """Length of a window of the batch profile, in seconds (:class:`.ClusterOptions`)."""
    forecast: str = LAST
    """Name of the forecasting method (:class:`.ClusterOptions`)."""

    def __post_init__(self) -> None:
        refuse_unless(self, lambda v: v >= 0, "at least 0", "workers")


class _Extension:
    """Adds options and metrics of clusters (:class:`.ServerExtension`)."""

    settings = ClusterSettings
    combinations = (
        Illegal(
            option="--profile-window-s",
            other="--mode off",
            why=_NO_EXIT,
        ),
        Illegal(option="--forecast", other="--mode off", why=_NO_EXIT),
        Illegal(
            option="--plan",
            without="--cluster",
            why="a plan needs the workers of a cluster file; name it with --cluster "
            "FILE, or leave it out",
        ),
        Illegal(
            option="--plan",
            other="--cluster ray",
            why="each Ray worker holds the whole model; name a cluster file with --cluster "
            "(Ray may start its workers), or leave it out",
        ),
        Illegal(
            option="--learn",
            other="--cluster",
            why="a model that is split among workers cannot be replaced by one with exits while it "
            "is served; leave one of them out, or use --workers",
        ),
        Illegal(
            option="--ray-address",
            without="--cluster ray",
            why="a cluster file has the address, as ray_address; leave it out",
        ),
    )

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add the options; all are fields of :class:`ClusterSettings`."""
        from offramp.server.arguments.option_groups import (  # noqa: PLC0415 - import circle
            OptionGroup,
            integer,
            number,
        )

        options = OptionGroup(
            parser, "workers", "Workers that run the stages, and plans.", ClusterSettings()
        )
        options.add(
            "--workers",
            "processes that run the stages, each a stream; one that dies is replaced without "
            "losing a request; on the CPU only (default: 0, the server runs them itself, which is "
            "faster)",
            metavar="N",
            type=integer(0),
        )
        options.add(
            "--cluster",
            "cluster.toml whose [[workers]] run the stages: processes here, eeworker on other "
            "hosts, actors of Ray; ray: one-CPU workers on Ray's free CPUs, or --workers N of them",
            metavar="FILE|ray",
            type=Path,
        )
        options.add(
            "--ray-address",
            "head of the cluster for --cluster ray (default: RAY_ADDRESS, or this host's cluster)",
            metavar="HOST:PORT",
        )
        options.add(
            "--plan",
            "plan.json of eecompile plan --json, to be served unchanged (default: the server "
            "plans, and again from its observations)",
            metavar="FILE",
            type=Path,
        )
        options.add(
            "--forecast",
            "forecast of the next window; last lost least, arima needs the extra forecast",
            choices=sorted(METHODS),
        )
        options.add(
            "--profile-window-s",
            "window of the batch profile (rows that run on after each exit), from which eecompile "
            "plan forecasts",
            metavar="S",
            type=number(1.0),
        )

    def engine_options(
        self, file: Mapping[str, Any], line: Mapping[str, Any], folder: Path | None
    ) -> Mapping[str, Any]:
        """Return the workers as devices, and the options of the extension."""
        if file.get("cluster") == RAY and line.get("cluster", RAY) != RAY:
            # These workers would be started by Ray.
            file = {name: value for name, value in file.items() if name != "workers"}
        requested = ClusterSettings(**{**file, **line})
        options = ClusterOptions(
            profile_window_s=requested.profile_window_s, forecast=requested.forecast
        )
        found = [
            folder if folder and name in file and name not in line else Path()
            for name in ("cluster", "plan")
        ]
        try:
            METHODS[requested.forecast]()
        except PlanError as error:
            raise SettingError(str(error), "forecast") from error
        try:
            devices = _devices(requested, *found)
        except (BackendError, PlanError) as error:
            raise SettingError(str(error), "cluster") from error
        extensions = {} if options == ClusterOptions() else {NAME: options}
        return {"devices": devices, "extensions": extensions}

    def families(self, models: Sequence[tuple[str, ModelStatistics]]) -> Iterator[Metric]:
        """Yield the metrics of batch profiles and plans."""
        from offramp.cluster.serving.plan_metrics import cluster_families  # noqa: PLC0415 - a circle

        return cluster_families(models)

    def sections(self, statistics: ModelStatistics) -> Iterable[str]:
        """Return the plan that a model is split by, and the last window of its batch profile."""
        from offramp.server.pages.status import describe_duration  # noqa: PLC0415 - import circle

        plan = view_plan(plan_of(statistics), describe_duration)
        profile = view_profile(profile_of(statistics))
        return [_template().render(plan=plan, profile=profile)] if plan or profile else []


def _devices(requested: ClusterSettings, folder: Path, plans: Path) -> WorkerDevices | None:
    """Return the requested workers.

    The path of the cluster file is relative to ``folder``, that of the plan to ``plans``.
    """
    if requested.cluster is None:
        return LocalWorkers(requested.workers) if requested.workers else None
    if requested.cluster == RAY:
        return ray_workers(requested.ray_address, requested.workers or None)
    if requested.workers:
        raise ValueError(
            f"workers is {requested.workers}, and a cluster has its own workers; omit one of "
            "the two"
        )
    plan = None if requested.plan is None else plans / requested.plan
    return read_cluster_workers(folder / requested.cluster, plan)


@cache
def _template() -> Template:
    return page_template("status.html", "offramp.cluster")


EXTENSION: Final = _Extension()
