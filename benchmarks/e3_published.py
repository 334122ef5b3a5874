"""Results of the E3 paper for the experiments of benchmarks/e3.py, and reasons for differences."""

from __future__ import annotations

from typing import Final

PUBLISHED: Final = {
    "mixes": """16 V100, batches of 8. Paper, fig. 7: at 80:20 x1.30 over BERT-base (source) and
        x1.44 over DeeBERT (run-through); fig. 16: at 20:80 up to 23 % below BERT-base""",
    "sizes": """16 V100, 80:20. Paper, fig. 7: the gain grows with the batch; 5.9: at batch 1 up to
        3 % below DeeBERT""",
    "forecast errors": """Goodput lost against a plan on the right forecast, 16 V100, batches of 8.
        Paper, fig. 22: 20 % costs 4-8 %""",
    "heterogeneous": """6 V100 + 8 P100 + 15 K80 against 16 V100 at equal cost, 80:20. Paper,
        fig. 13: up to x1.70""",
    "stragglers": """One of 16 V100, of the last split, takes four times as long; 80:20, batches of
        8. Paper: no figure; 3.3 leaves stragglers out of the next assignment""",
    "wrapper": """Exits inside splits may be off, against all on; 80:20, 16 V100, batches of 8.
        Paper, fig. 25: up to +16 %""",
    "bursts": """Share of the requests in time under a recorded trace, 80:20, 16 V100, batches of 8.
        Paper, fig. 19, another trace: goodput +29 % over DeeBERT, +16 % over BERT-base""",
}
DIFFERS: Final = {
    "mixes": """Gains over source are larger than the paper's: there DeeBERT is at x0.90 of
        BERT-base (1.30 / 1.44), here run-through at x1.47, as an exit costs 2 % of a layer and easy
        rows leave from the first layer on, which are assumptions. Dedicated stays behind its
        prediction (x1.93), which has transfers overlap with work. At 20:80 nothing is below source.
        Shared is best on equal devices: whole numbers of devices and fixed borders cost it
        nothing.""",
    "sizes": """At batch 1 the plan is the whole model on each device, and nothing is lost to
        run-through but the 2 % that rates are found to.""",
    "forecast errors": """Dedicated devices starve the last split where more rows go on than was
        expected, by far more than in the paper, whose example has one two-way split. Where devices
        steal, a plan for the wrong forecast is as good as one for the right one: it is where they
        begin, not all that they do.""",
    "heterogeneous": """It hangs on batch curves, which the paper does not print: those assumed gain
        the less from batches the slower the device, so mixed devices win at batch 1 and not at 8.
        At 1 the plan is the whole model on each device.""",
    "stragglers": """After two windows of slow runs the straggler is given none but probes; one
        device less is 6.3 %. Where devices are dedicated, another split limits them.""",
    "wrapper": """Exits cost 2 % of a layer in all other experiments; the paper's gain is near that
        of exits that cost more.""",
    "bursts": """Another trace, and a share instead of a rate.""",
}
