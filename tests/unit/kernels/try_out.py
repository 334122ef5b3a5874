"""A few launches that a fault of the kernels does not survive.

A program, since broken kernels may take the process with them: ``try_out LIBRARY`` ends with
:data:`FOUND` where results are wrong.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from tests.unit.kernels.cases import StageEndCase, new_scratch, random_scores
from tests.unit.kernels.shim import Cpu

from offramp.engine.kernels.kernel_arguments import CheckKind, ExitCheck

FOUND = 42


def try_out(cpu: Cpu) -> None:
    """Stage ends of all kinds, small and many.

    Raises:
        AssertionError: Something is not as it should be.
    """
    rng = np.random.default_rng(0)
    scratch = new_scratch(100, rng)
    for seed in range(10):
        for kind in CheckKind:
            check = ExitCheck(kind=kind, classes=70, threshold=0.5)
            case = StageEndCase(
                check=check,
                values=random_scores(rng, (100, 70), kind),
                score_type="float32",
                rng=rng,
                row_bytes=(16, 2100, 3),
                scratch=scratch,
            )
            case.run(cpu, seed=seed, resident=1 + seed % 4, block=(64, 128)[seed % 2])


if __name__ == "__main__":
    try:
        try_out(Cpu(Path(sys.argv[1])))
    except AssertionError as error:
        print(error)
        sys.exit(FOUND)
