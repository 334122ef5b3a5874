"""Criteria: what says how sure an exit is of its answer, one number from 0 to 1.

A sample leaves where it reaches the exit's threshold, so records, promises and kernels know no
criterion. Those of :data:`IN_GRAPH` are computed by the exit's own graph; all others on the host,
from the exit's answers (:mod:`offramp.engine.answers.criteria`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from offramp.bundle.schema.serde import LEFT_OUT

IN_GRAPH: Final = ("probability", "entropy", "margin", "learned")
"""Criteria of one answer alone: its largest probability; 1 − its entropy over that of all classes
alike (BranchyNet, DeeBERT, turned round); how far its two largest probabilities are apart; a
logistic regression over these three."""
PATIENCE: Final = "patience"
"""How many exits in a row gave the same class (PABEE); :func:`.answers.criteria.patience`."""
BUILT_IN: Final = (*IN_GRAPH, PATIENCE)
LEARNED_WEIGHTS: Final = 4
"""Of ``learned``, for each exit: of the three statistics' log-odds, and a constant."""
_NAME: Final = re.compile(r"[a-z][a-z0-9_-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Criterion:
    """What says how sure an exit is."""

    name: str = "probability"
    """One of ``BUILT_IN``, or the name that a user's function is registered under."""
    depends_on_earlier: bool = field(default=False, metadata=LEFT_OUT)
    """Whether it looks at what the exits before said of a sample: then all exits of the bundle run
    up to the last in use."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"criterion {self.name!r:.80}: expected small letters, digits, - and _, a letter "
                "first"
            )
        if self.name in BUILT_IN and self.depends_on_earlier != (self.name == PATIENCE):
            depends = "depends" if self.depends_on_earlier else "does not depend"
            raise ValueError(f"criterion {self.name}: said that it {depends} on earlier exits")

    @property
    def on_host(self) -> bool:
        """Whether it is computed from an exit's answers, outside of its graph."""
        return self.name not in IN_GRAPH


PROBABILITY: Final = Criterion()
