"""Compiling options that cannot be combined with subnets."""

from __future__ import annotations

from typing import Final

from offramp.commands.combinations import Illegal
from offramp.compiler.common.options import depends_on_earlier

_NOT_ELASTIC = "subnets do not work with it yet; leave one of them out"
COMBINATIONS: Final = (
    *(Illegal(option="--elastic", other=other, why=_NOT_ELASTIC)
      for other in ("--precision int8|auto", "--train joint", "--heads bridges|both",
                    "--selection pame")),
    Illegal(option="--elastic", other="--data random",
            why="subnets are chosen by their agreement, which random inputs do not show; use "
            "samples"),
    Illegal(option="--elastic", other="--criterion", when=depends_on_earlier, why=_NOT_ELASTIC),
)  # fmt: skip
