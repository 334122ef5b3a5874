"""Run the whole zoo and write ``docs/models.md``: ``python -m tests.zoo > docs/models.md``."""

from __future__ import annotations

import importlib.metadata
import sys
import tempfile
from pathlib import Path

from tests.zoo.variants import Outcome, examine, variants

_PACKAGES = ("torch", "onnxscript", "transformers", "onnx", "onnxruntime", "onnxslim")

_MOST = 240
"""Letters of a remark."""
_HEAD = """\
# Models that were tried

Written by `python -m tests.zoo`; do not edit. Small models of each topology with random weights,
exported by both of torch's exporters (`dynamo` is the default of `torch.onnx.export`), with a batch
fixed at 1 or 2, and a dynamic one. Each was read (which compares rows alone and together, and with
the original where the batch was fixed), cut at up to 12 places, and run in pieces at batches of 1,
7 and 64. *Work* is the share of FLOPs before the first and the last cut point; *error* the largest
difference between pieces and model, relative to the largest value. {verified} of {tried} variants
are verified. They are given no exits here, and are not served."""


def main() -> None:
    outcomes: list[Outcome] = []
    lacking: set[str] = set()
    for variant in variants():
        if (missing := variant.missing()) is not None:
            lacking.add(missing)
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                outcomes.append(examine(variant, Path(folder)))
            except Exception as error:  # an exporter's own
                reason = " ".join(str(error).split())[:80]
                outcomes.append(Outcome(variant, remark=f"torch cannot export it: {reason}"))
        print(outcomes[-1], file=sys.stderr)
    print(page(outcomes, lacking), end="")


def page(outcomes: list[Outcome], lacking: set[str]) -> str:
    """The page, from what came of the variants."""
    verified = sum(outcome.verified for outcome in outcomes)
    installed = [name for name in _PACKAGES if name not in lacking]
    versions = [f"{name} {importlib.metadata.version(name)}" for name in installed]
    lines = [
        _HEAD.format(verified=verified, tried=len(outcomes)),
        "",
        f"With {', '.join(versions)}.",
        "",
        "| family | exporter | batch | cuts | work before first, last | error | remark |",
        "|---|---|---|---:|---|---:|---|",
    ]
    lines += [_row(outcome) for outcome in outcomes]
    return "\n".join(lines) + "\n"


def _row(outcome: Outcome) -> str:
    variant = outcome.variant
    facts = [variant.family, variant.exporter, str(variant.batch)]
    if outcome.verified:
        facts += [str(outcome.cuts), f"{outcome.first:.1%}, {outcome.last:.1%}"]
        facts += [
            f"{outcome.worst:.0e}" if outcome.worst else "0",
            "" if outcome.form == "logits" else outcome.form,
        ]
    else:
        remark = " ".join(outcome.remark.replace("|", "/").split())
        facts += ["–", "–", "–", f"{remark[:_MOST]}…" if len(remark) > _MOST else remark]
    return f"| {' | '.join(facts)} |"


if __name__ == "__main__":
    main()
