"""SIMULATED: gain of refilled batches if a step takes the same time for any number of rows.

    python -m benchmarks.generation_refill [--texts 600] [--json FILE]

On one CPU core the time of a step of the small example is about proportional to its rows, so full
batches bring nothing there. On a device that reads its weights once per step, full batches help.
Here a step of a stage takes 1 ms a layer for 1 to ``batch`` rows, on virtual time, with the
server's own scheduler; tokens leave at random by the shares that are given. Batches that are
refilled across sequences (E3 5.1.3) are compared with batches that start and end together (as
CALM's would), and with the model in full.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from benchmarks.common import make_parser

from offramp.generation.scheduling import (
    RecordedText,
    RefillPolicy,
    StepPolicy,
    StepSeconds,
    TextLimits,
    TogetherPolicy,
    simulate_text,
)
from offramp.generation.scheduling.simulation import SIMULATED
from offramp.tools.bench.common.output import (
    check_outputs,
    describe_environment,
    figure_table,
    wide_console,
    write_json,
)


class TextLoad(NamedTuple):
    """A load of text: its stages, and the shares of tokens that leave after each stage."""

    name: str
    layers: tuple[int, ...]
    """Number of layers of each stage."""
    shares: tuple[float, ...]
    """Share of the tokens that leave after each stage."""


LOADS: Final = (
    TextLoad("example, whole answers", (1, 1, 2, 4), (0.744, 0.203, 0.041, 0.012)),
    TextLoad("70 % by layer 2 of 8 (E3 5.1.3)", (2, 6), (0.7, 0.3)),
)
SIZES: Final = ((8, 8), (16, 8), (32, 16), (48, 16))
"""Number of sequences in flight, and largest number of rows of a step."""
_LAYER_S: Final = 1e-3
_PREFILL_S: Final = 2e-3
_MEAN, _DEVIATION, _LEAST = 34.7, 9.0, 5
"""Mean, standard deviation and minimum of the number of tokens of an answer."""


def main() -> int:
    """Simulate, print and write."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--texts", type=int, default=600, help="number of sequences in a simulation"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    check_outputs(options.json)
    rows = [row for load in LOADS for row in simulate(load, texts=options.texts, seed=options.seed)]
    table = figure_table(
        f"{SIMULATED}: tokens a second, as ratios",
        "A step takes as long whatever its rows.",
        ("load", "sequences", "rows a step", "refilled over together", "refilled over full",
         "together over full"),
        names=("load",),
    )  # fmt: skip
    for row in rows:
        ratios = (f"×{row[key]:.2f}" for key in ("over_together", "refilled", "together"))
        table.add_row(str(row["load"]), str(row["slots"]), str(row["batch"]), *ratios)
    wide_console(120).print(table)
    facts = describe_environment(label=SIMULATED, texts=options.texts, seed=options.seed)
    write_json(options.json, {"rows": rows, "environment": facts})
    return 0


def simulate(load: TextLoad, *, texts: int, seed: int) -> list[dict[str, str | int | float]]:
    """Return the ratios of one load at all sizes."""
    rng = np.random.default_rng(seed)
    lengths = np.maximum(rng.normal(_MEAN, _DEVIATION, texts).astype(int), _LEAST)
    depths = [tuple(rng.choice(len(load.layers), n, p=load.shares).tolist()) for n in lengths]
    full = [(0,) * len(depth) for depth in depths]
    found: list[dict[str, str | int | float]] = []
    for slots, batch in SIZES:
        whole = _rate((sum(load.layers),), full, RefillPolicy(), slots, batch)
        refilled = _rate(load.layers, depths, RefillPolicy(), slots, batch)
        together = _rate(load.layers, depths, TogetherPolicy(), slots, batch)
        found.append(
            {
                "load": load.name,
                "slots": slots,
                "batch": batch,
                "over_together": refilled / together,
                "refilled": refilled / whole,
                "together": together / whole,
            }
        )
    return found


def _rate(
    layers: Sequence[int],
    depths: Sequence[tuple[int, ...]],
    policy: StepPolicy,
    slots: int,
    batch: int,
) -> float:
    """Return tokens a second."""
    limits = TextLimits(
        stages=len(layers), slots=slots, length=1 + max(map(len, depths)), batch=batch,
        prompt_in_slot=False,
    )  # fmt: skip
    seconds = StepSeconds(
        prefill=(_PREFILL_S,) * (batch + 1),
        stages=tuple((_LAYER_S * count,) * (batch + 1) for count in layers),
    )
    texts = [RecordedText(prompt_tokens=1, depths=depth) for depth in depths]
    return simulate_text(limits, policy, seconds, texts).tokens_per_s


if __name__ == "__main__":
    sys.exit(main())
