"""The part of a cluster file about workers that Ray starts; :mod:`.cluster_file` reads it.

``launch = "ray"`` in ``[router]`` makes all workers without an address actors of Ray. Optional keys
are ``ray_address``, the address of the cluster's head, and ``least``, the smallest number of
workers to start with. The ``resources`` of a device are reserved by Ray for its actor; their names
are Ray's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

LAUNCH_KEYS: Final = ("launch", "ray_address", "least")
"""Keys of ``[router]`` about Ray."""
ONE_CPU: Final[Mapping[str, float]] = {"CPU": 1.0}
"""Resources of an actor by default."""
_LAUNCHES: Final = ("process", "ray")
_MOST_NAME: Final = 100
_MOST_AMOUNT: Final = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class RayEntry:
    """Options for workers that Ray starts."""

    address: str | None = None
    """HOST:PORT of the cluster's head; ``None`` uses the cluster that runs on this host."""
    least: int | None = None
    """Smallest number of workers that a server starts with; ``None`` requires all. Others join when
    Ray has resources."""


def read_launch(actors: Sequence[str], content: Mapping[str, Any]) -> RayEntry | None:
    """Read how ``[router]`` starts workers; ``None`` without Ray. ValueError if malformed.

    ``actors`` are the device types with ``resources``, which only Ray uses.
    """
    launch = content.get("launch", "process")
    if launch not in _LAUNCHES:
        raise ValueError(f"launch = {launch!r:.80}, expected one of {', '.join(_LAUNCHES)}")
    if launch != "ray":
        for key in ("ray_address", "least"):
            if key in content:
                raise ValueError(f'has {key}, which needs Ray; add launch = "ray"')
        if actors:
            raise ValueError(
                f'has no launch = "ray", and [devices.{actors[0]}] has resources, which need '
                "Ray; add the one, or remove the other"
            )
        return None
    address, least = content.get("ray_address"), content.get("least")
    if address is not None and (type(address) is not str or not address.isprintable()):
        raise ValueError(f'ray_address = {address!r:.80}, expected for instance "10.0.0.1:6379"')
    if least is not None and (type(least) is not int or least < 1):
        raise ValueError(
            f"least = {least!r:.80}, expected a whole number from 1: the smallest number of "
            "workers that a server starts with"
        )
    return RayEntry(address=address, least=least)


def read_resources(value: object) -> dict[str, float] | None:
    """Read an actor's resources; ``None`` if absent; ValueError if malformed."""
    if value is None:
        return None
    example = "expected for instance { CPU = 2, gadget = 1 }, by Ray's names"
    if not isinstance(value, dict) or not value:
        raise ValueError(f"resources = {value!r:.80}, {example}")
    for name, amount in value.items():
        if not name or len(name) > _MOST_NAME or not name.isprintable():
            raise ValueError(f"resources has the name {name!r:.120}, {example}")
        if type(amount) not in (int, float) or not 0 < amount <= _MOST_AMOUNT:
            raise ValueError(f"resources: {name} = {amount!r:.80}, expected a number above 0")
        if amount > 1 and amount != int(amount):
            raise ValueError(
                f"resources: {name} = {amount!r:.80}, expected a whole number, or a share below 1, "
                "as Ray requires"
            )
    return {name: float(amount) for name, amount in value.items()}
