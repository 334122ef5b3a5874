"""Run the whole zoo and write ``docs/models.md``: ``python -m tests.zoo > docs/models.md``.

It takes about an hour on one core. With ``--kept FILE`` outcomes are kept, a line each, and those
that are there already are not found again; ``--only TEXT`` runs what has it in its name, and
writes no page.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from tests.zoo.notes import HEAD, TAIL
from tests.zoo.trial import Outcome, examine
from tests.zoo.variants import Variant, variants

_PACKAGES = (
    "torch", "onnxscript", "timm", "torchvision", "transformers", "onnx", "onnxruntime", "onnxslim"
)  # fmt: skip

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_MOST = 240
"""Letters of a remark."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo")
    parser.add_argument("--kept", type=Path, help="file with outcomes, which is added to")
    parser.add_argument("--only", help="what the names of variants have to hold")
    options = parser.parse_args()
    chosen = [v for v in variants() if options.only is None or options.only in str(v)]
    outcomes = list(_outcomes(chosen, options.kept))
    if options.only is None:
        print(page(outcomes), end="")


def _outcomes(chosen: Sequence[Variant], kept: Path | None) -> Iterator[Outcome]:
    known = _read(kept) if kept is not None and kept.exists() else {}
    for variant in chosen:
        if variant.missing() is not None:
            continue
        if variant not in known:
            known[variant] = outcome = _found(variant)
            print(f"{variant}: {outcome.remark or 'verified'}", file=sys.stderr, flush=True)
            if kept is not None:
                with kept.open("a") as file:
                    file.write(json.dumps(asdict(outcome)) + "\n")
        yield known[variant]


def _read(kept: Path) -> dict[Variant, Outcome]:
    lines = [json.loads(line) for line in kept.read_text().splitlines()]
    found = [Outcome(**{**line, "variant": Variant(**line["variant"])}) for line in lines]
    return {outcome.variant: outcome for outcome in found}


def _found(variant: Variant) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        try:
            return examine(variant, Path(folder))
        except Exception as error:  # an exporter's or converter's own
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            return Outcome(variant, remark=f"it cannot be made: {reason}")


def page(outcomes: Sequence[Outcome]) -> str:
    """The page, from what came of the variants."""
    verified = sum(outcome.verified for outcome in outcomes)
    lines = [
        HEAD.format(verified=verified, tried=len(outcomes)),
        f"With {', '.join(_versions())}.",
        "",
        "| family | exporter | batch | cuts | work before first, last | error | heads | remark |",
        "|---|---|---|---:|---|---:|---|---|",
        *(_row(outcome) for outcome in outcomes),
        "",
        TAIL,
    ]
    return "\n".join(lines)


def _versions() -> Iterator[str]:
    for name in _PACKAGES:
        try:
            yield f"{name} {importlib.metadata.version(name).split('+')[0]}"
        except importlib.metadata.PackageNotFoundError:
            continue


def _row(outcome: Outcome) -> str:
    variant = outcome.variant
    facts = [variant.family, variant.how, variant.size]
    if outcome.verified:
        facts += [str(outcome.cuts), f"{outcome.first:.1%}, {outcome.last:.1%}"]
        facts += [f"{outcome.worst:.0e}" if outcome.worst else "0", outcome.heads]
        facts.append("" if outcome.form == "logits" else outcome.form)
    else:
        plain = _COLOURS.sub("", outcome.remark)  # torch's exporter writes for a terminal
        remark = " ".join(plain.replace("|", "/").split())
        facts += ["–"] * 4 + [f"{remark[:_MOST]}…" if len(remark) > _MOST else remark]
    return f"| {' | '.join(facts)} |"


if __name__ == "__main__":
    main()
