"""What a cluster file says of workers that Ray starts; see :mod:`.cluster_file`, which reads it.

``launch = "ray"`` in ``[router]`` makes actors of Ray of all workers that have no address. Beside
it may stand ``ray_address``, of the cluster's head, and ``least``. What an actor takes is said by
``resources`` of its device, by Ray's names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

LAUNCH_KEYS: Final = ("launch", "ray_address", "least")
"""Those of ``[router]``."""
ONE_CPU: Final[Mapping[str, float]] = {"CPU": 1.0}
"""What an actor takes if nothing is said."""
_LAUNCHES: Final = ("process", "ray")
_MOST_NAME: Final = 100
_MOST_AMOUNT: Final = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class RayEntry:
    """How workers are started by Ray."""

    address: str | None = None
    """HOST:PORT of the cluster's head; ``None`` is the cluster that this host is of."""
    least: int | None = None
    """Workers without which no server starts; ``None`` is all. Others come when there is room."""


def read_launch(actors: Sequence[str], content: Mapping[str, Any]) -> RayEntry | None:
    """Read how ``[router]`` starts workers; ``None`` if not by Ray. ValueError.

    ``actors`` are the types of device that have resources, which are Ray's.
    """
    launch = content.get("launch", "process")
    if launch not in _LAUNCHES:
        raise ValueError(f"launch = {launch!r:.80}, expected one of {', '.join(_LAUNCHES)}")
    if launch != "ray":
        for key in ("ray_address", "least"):
            if key in content:
                raise ValueError(f'has {key}, which is for Ray; add launch = "ray"')
        if actors:
            raise ValueError(
                f'has no launch = "ray", and [devices.{actors[0]}] has resources, which are for '
                "Ray; add the one, or leave out the other"
            )
        return None
    address, least = content.get("ray_address"), content.get("least")
    if address is not None and (type(address) is not str or not address.isprintable()):
        raise ValueError(f'ray_address = {address!r:.80}, expected for instance "10.0.0.1:6379"')
    if least is not None and (type(least) is not int or least < 1):
        raise ValueError(
            f"least = {least!r:.80}, expected a whole number from 1: workers without which no "
            "server starts"
        )
    return RayEntry(address=address, least=least)


def read_resources(value: object) -> dict[str, float] | None:
    """Read what an actor takes, if it is said; ValueError."""
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
                "as Ray takes no other"
            )
    return {name: float(amount) for name, amount in value.items()}
