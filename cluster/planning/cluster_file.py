"""Reads ``cluster.toml``: the devices to plan for, their cost, and the workers that serve.

Each ``[devices.NAME]`` has ``count``, ``cost_per_hour``, and the device's speed: either
``profile``, the file of a profile that was measured on such a device (for instance a bundle's
``profiles/cpu.json``), or ``speed``, a factor relative to the bundle's own profile. ``[link]`` is
the connection between any two splits, ``[[links]]`` those between two types.

Each entry of ``[[workers]]`` has one device type. An entry with an ``address`` is an ``eeworker``
that listens there; an entry without one is ``count`` processes on the router's host. A worker with
a ``backend`` uses a GPU of its host (:mod:`.worker_entry`). ``[router]`` has the router's
credentials for workers; Ray may start workers without an address (:mod:`.ray_entry`). Sans I/O.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any, Final

from offramp.cluster.planning.cluster_plan import PlanError
from offramp.cluster.planning.goal import SLACK, PlanningGoal
from offramp.cluster.planning.ray_entry import LAUNCH_KEYS, RayEntry, read_launch, read_resources
from offramp.cluster.planning.worker_entry import WorkersEntry, read_device
from offramp.engine.scheduling import DeviceLink

MOST_FILE_BYTES: Final = 2**20
_MOST: Final = 1e12
"""Largest allowed number; a larger one is assumed to be a mistake."""
_MOST_COUNT: Final = 100_000
_MOST_NAME: Final = 60
_TOP: Final = ("devices", "link", "links", "workers", "router", "goal")
_DEVICE: Final = ("count", "cost_per_hour", "speed", "profile", "memory_gib", "resources")
_LINK: Final = ("gbit_per_s", "latency_ms")
_WORKERS: Final = ("device", "address", "count", "backend")
_GOAL: Final = ("slo_ms", "rate", "slack", "cost_factor")
_ROUTER_FILES: Final = ("token_file", "tls_ca", "tls_cert", "tls_key")
_TOML_TYPES: Final = {
    bool: "a boolean", int: "an integer", float: "a float", str: "a string", list: "an array",
    dict: "a table",
}  # fmt: skip


class ClusterFileError(PlanError):
    """A cluster file cannot be read; the message is one line: key, value, expectation, remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEntry:
    """One table ``[devices.NAME]``."""

    name: str
    count: int
    cost_per_hour: float
    speed: float | None
    """Speed as a factor of the bundle's own profile; ``None`` if there is a profile."""
    profile: str | None
    """File of a profile, relative to the cluster file."""
    memory_bytes: float
    resources: Mapping[str, float] | None = None
    """Resources that Ray reserves for a worker on such a device; ``None`` if not configured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterEntry:
    """The table ``[router]``; files are relative to the cluster file."""

    token_file: str | None = None
    """File of the secret that router and workers share."""
    tls_ca: str | None = None
    """File of the authorities that sign workers' certificates; ``None`` disables encryption."""
    tls_cert: str | None = None
    tls_key: str | None = None
    """File of the key of the router's certificate, for workers that require a certificate."""
    insecure: bool = False
    """``True`` if workers on other hosts may be reached without encryption."""
    most_result_mib: int | None = None
    """Largest result received over a network, in MiB; ``None`` keeps the default."""
    batches_per_worker: int = 1
    """Number of batches that a worker holds at a time. With 2, a worker receives the next batch,
    and sends the results of the last one, while it computes (E3 3.2.2)."""
    ray: RayEntry | None = None
    """Options of Ray for workers without an address, if Ray starts them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoalEntry:
    """The table ``[goal]``: the goal of plans, unless flags replace it."""

    slo_ms: float | None = None
    rate: float | None = None
    slack: float = SLACK
    cost_factor: float = 1.0

    def goal(self, batch_sizes: Sequence[int], *, wrapper: bool = True) -> PlanningGoal:
        """Return the goal for plans of these batch sizes."""
        return PlanningGoal(
            slo_s=math.inf if self.slo_ms is None else self.slo_ms / 1e3,
            slack=self.slack,
            rate_rps=self.rate,
            cost_factor=self.cost_factor,
            wrapper=wrapper,
            batch_sizes=tuple(batch_sizes),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFile:
    """Content of a cluster file, before profiles are read."""

    devices: tuple[DeviceEntry, ...]
    link: DeviceLink
    links: tuple[tuple[str, str, DeviceLink], ...]
    workers: tuple[WorkersEntry, ...] = ()
    """Workers that serve; planning ignores them."""
    router: RouterEntry = RouterEntry()
    goal: GoalEntry = GoalEntry()


def parse_cluster(content: bytes, where: str = "cluster.toml") -> ClusterFile:
    """Parse a cluster file; ClusterFileError with a one-line reason."""
    if len(content) > MOST_FILE_BYTES:
        raise ClusterFileError(
            f"{where}: has {len(content):,} bytes, expected at most {MOST_FILE_BYTES:,}; name "
            "types of devices, not single ones"
        )
    try:
        document = tomllib.loads(content.decode())
    except UnicodeDecodeError as error:
        raise ClusterFileError(f"{where}: is not UTF-8, as TOML has to be: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ClusterFileError(f"{where}: is not TOML: {_one_line(str(error))}") from error
    except (RecursionError, ValueError) as error:
        reason = _one_line(str(error)).partition(";")[0]
        raise ClusterFileError(
            f"{where}: is nested too deep or has a number out of range: {reason}; expected tables "
            "of single values"
        ) from error
    _refuse_unknown(document, _TOP, where)
    devices = _table(document.get("devices", {}), f"{where} [devices]")
    if not devices:
        raise ClusterFileError(
            f"{where} [devices]: names no type, expected one at least, for instance [devices.gpu] "
            "with count = 4 and cost_per_hour = 1.5"
        )
    entries = tuple(_device(name, table, where) for name, table in devices.items())
    names = [entry.name for entry in entries]
    links = document.get("links", [])
    if not isinstance(links, list):
        raise ClusterFileError(f"{where} [[links]] is {_kind(links)}, expected an array of tables")
    between = tuple(
        _between(table, names, f"{where} [[links]] {number}")
        for number, table in enumerate(links, 1)
    )
    pairs = [(a, b) for a, b, _ in between]
    for number, pair in enumerate(pairs):
        if pair in pairs[:number]:
            raise ClusterFileError(
                f"{where} [[links]] {number + 1}: from {pair[0]} to {pair[1]} is defined twice; "
                "remove one"
            )
    place = f"{where} [link]"
    actors = [_shown_name(entry.name) for entry in entries if entry.resources is not None]
    router = _router(document.get("router", {}), f"{where} [router]", actors)
    return ClusterFile(
        devices=entries,
        link=_link(_table(document.get("link", {}), place), place),
        links=between,
        workers=_all_workers(document.get("workers", []), entries, where),
        router=router,
        goal=_goal(_table(document.get("goal", {}), f"{where} [goal]"), f"{where} [goal]"),
    )


def _goal(table: Mapping[str, Any], where: str) -> GoalEntry:
    _refuse_unknown(table, _GOAL, where)
    above = {key: 0.0 for key in _GOAL if key != "slack"}
    given = {
        key: _number(table, key, where, least=0.0, above=above.get(key, -math.inf)) for key in table
    }
    if given.get("slack", 0.0) >= 1:
        raise ClusterFileError(f"{where} slack = {table['slack']!r}, expected a share below 1")
    return GoalEntry(**given)


def _device(name: str, table: object, where: str) -> DeviceEntry:
    place = f"{where} [devices.{_shown_name(name)}]"
    if not name or len(name) > _MOST_NAME or not name.isprintable():
        raise ClusterFileError(
            f"{place}: expected a name of 1 to {_MOST_NAME} printable characters; rename it"
        )
    content = _table(table, place)
    _refuse_unknown(content, _DEVICE, place)
    for key in ("count", "cost_per_hour"):
        if key not in content:
            raise ClusterFileError(f"{place} has no {key}; expected for instance {key} = 4")
    profile = content.get("profile")
    fine = type(profile) is str and profile and profile.isprintable()
    if profile is not None and not fine:
        raise ClusterFileError(
            f"{place} profile = {_shown(profile)}, expected the file of a profile, for instance "
            '"gpu/profiles/cpu.json"'
        )
    if (profile is None) == ("speed" not in content):
        what = "both speed and profile" if profile is not None else "neither speed nor profile"
        raise ClusterFileError(
            f"{place} has {what}, expected one: profile = a file measured on that device, or "
            "speed = its factor relative to the bundle's own profile"
        )
    return DeviceEntry(
        name=name,
        count=_whole(content, "count", place, hint="; remove the type if there is none"),
        cost_per_hour=_number(content, "cost_per_hour", place, least=0.0),
        speed=None if profile is not None else _number(content, "speed", place, above=0.0),
        profile=profile,
        memory_bytes=2**30 * _number(content, "memory_gib", place, above=0.0, default=math.inf),
        resources=_of_ray(read_resources, content.get("resources"), place),
    )


def _of_ray(read: Callable[[Any], Any], value: object, place: str) -> Any:
    try:
        return read(value)
    except ValueError as error:
        raise ClusterFileError(f"{place} {error}") from error


def _between(table: object, names: Sequence[str], place: str) -> tuple[str, str, DeviceLink]:
    content = _table(table, place)
    _refuse_unknown(content, ("from", "to", *_LINK), place)
    for key in ("from", "to"):
        if content.get(key) not in names:
            raise ClusterFileError(
                f"{place} {key} = {_shown(content.get(key))}, expected a type of [devices]: "
                f"{', '.join(names)!s:.200}"
            )
    rest = {key: value for key, value in content.items() if key in _LINK}
    return content["from"], content["to"], _link(rest, place)


def _all_workers(
    tables: object, devices: Sequence[DeviceEntry], where: str
) -> tuple[WorkersEntry, ...]:
    """Read ``[[workers]]``; refuse duplicates, and more workers of a type than it has devices."""
    if not isinstance(tables, list):
        told = f"{where} [[workers]] is {_kind(tables)}, expected an array of tables"
        raise ClusterFileError(told)
    left = {device.name: device.count for device in devices}
    found: list[WorkersEntry] = []
    for number, table in enumerate(tables, 1):
        place = f"{where} [[workers]] {number}"
        entry = _workers(table, tuple(left), place)
        left[entry.device] -= entry.count
        if left[entry.device] < 0:
            count = next(device.count for device in devices if device.name == entry.device)
            raise ClusterFileError(
                f"{place}: more workers than the {count} of [devices.{_shown_name(entry.device)}]; "
                "remove workers, or raise that count"
            )
        if shared := [gpu for other in found for gpu in entry.shared_gpus(other)]:
            raise ClusterFileError(
                f"{place} device = {_shown(table['device'])}: another worker has cuda:{shared[0]} "
                "of that host, expected a separate GPU for each; name another"
            )
        if entry.address is not None and entry.address in [other.address for other in found]:
            raise ClusterFileError(
                f"{place} address = {_shown(entry.address)}: occurs twice, but a worker serves one "
                "router at a time; start another worker on another port"
            )
        found.append(entry)
    return tuple(found)


def _workers(table: object, names: Sequence[str], place: str) -> WorkersEntry:
    content = _table(table, place)
    _refuse_unknown(content, _WORKERS, place)
    address = content.get("address")
    try:
        device, gpu = read_device(content.get("device"), content.get("backend"), names)
    except ValueError as error:
        raise ClusterFileError(f"{place} {error}") from error
    if address is not None and type(address) is not str:
        raise ClusterFileError(
            f'{place} address = {_shown(address)}, expected for instance "10.0.0.2:7070"; omit it '
            "for processes on this host"
        )
    count = _whole(content, "count", place)
    if address is not None and count > 1:
        raise ClusterFileError(
            f"{place} has an address and count = {count}, expected one worker at an address; "
            "give each worker its own port and entry"
        )
    if gpu is not None and count > 1:
        raise ClusterFileError(
            f"{place} names GPU {gpu} and count = {count}, expected one worker on a GPU; give each "
            "its own entry, or omit the number to use the GPUs from 0 on"
        )
    gpus = () if "backend" not in content else (gpu,) if gpu is not None else range(count)
    return WorkersEntry(
        device=device,
        address=address,
        count=count,
        backend=content.get("backend", ""),
        gpus=tuple(gpus),
    )


def _router(table: object, place: str, actors: Sequence[str]) -> RouterEntry:
    content = _table(table, place)
    counts = ("most_result_mib", "batches_per_worker")
    _refuse_unknown(content, (*_ROUTER_FILES, "insecure", *counts, *LAUNCH_KEYS), place)
    for key in _ROUTER_FILES:
        name = content.get(key)
        if name is not None and (type(name) is not str or not name or not name.isprintable()):
            raise ClusterFileError(
                f"{place} {key} = {_shown(name)}, expected the name of a file, relative to the "
                "cluster file"
            )
    if type(content.get("insecure", False)) is not bool:
        raise ClusterFileError(
            f"{place} insecure = {_shown(content['insecure'])}, expected true or false"
        )
    _whole(content, "most_result_mib", place, most=4096, hint=", which messages hold")
    _whole(content, "batches_per_worker", place, most=4)
    if ("tls_cert" in content) != ("tls_key" in content):
        raise ClusterFileError(
            f"{place} has one of tls_cert and tls_key, expected both: a certificate and its key"
        )
    if "tls_cert" in content and "tls_ca" not in content:
        raise ClusterFileError(
            f"{place} has tls_cert and no tls_ca, expected the authorities of workers' "
            "certificates too; add tls_ca"
        )
    rest = {key: value for key, value in content.items() if key not in LAUNCH_KEYS}
    return RouterEntry(**rest, ray=_of_ray(partial(read_launch, actors), content, place))


def _link(content: Mapping[str, Any], place: str) -> DeviceLink:
    _refuse_unknown(content, _LINK, place)
    gbit_per_s = _number(content, "gbit_per_s", place, above=0.0, default=math.inf)
    latency_ms = _number(content, "latency_ms", place, least=0.0, default=0.0)
    return DeviceLink(bytes_per_s=gbit_per_s * 1e9 / 8, latency_s=latency_ms / 1e3)


def _number(
    content: Mapping[str, Any],
    key: str,
    place: str,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    default: float | None = None,
) -> float:
    if key not in content and default is not None:
        return default
    value = content[key]
    bound = "more than 0" if above == 0.0 else "at least 0"
    fine = type(value) in (int, float) and least <= value <= _MOST and value > above
    if not fine or (0 < value < 1 / _MOST):
        raise ClusterFileError(
            f"{place} {key} = {_shown(value)}, expected a number of {bound}, and at most "
            f"{_MOST:g}; check the unit"
        )
    return float(value)


def _whole(
    content: Mapping[str, Any], key: str, place: str, *, most: int = _MOST_COUNT, hint: str = ""
) -> int:
    value = content.get(key, 1)
    if type(value) is not int or not 1 <= value <= most:
        told = f"{place} {key} = {_shown(value)}, expected a whole number from 1 to {most:,}{hint}"
        raise ClusterFileError(told)
    return value


def _table(value: object, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ClusterFileError(f"{place} is {_kind(value)}, expected a table")
    return value


def _refuse_unknown(content: Mapping[str, Any], known: Sequence[str], place: str) -> None:
    for key in content:
        if key not in known:
            near = get_close_matches(key, known, 1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ClusterFileError(
                f"{place}: unknown key {_shown(key)}{hint}, expected {', '.join(known)}"
            )


def _kind(value: object) -> str:
    return _TOML_TYPES.get(type(value), "a date or time")


def _shown(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 1023:
        return f"an integer of {value.bit_length():,} bits"
    return f"{value!r:.80}"


def _shown_name(name: str) -> str:
    return name if name.isprintable() and len(name) <= _MOST_NAME else f"{name!r:.80}"


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
