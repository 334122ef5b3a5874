"""Shows a bundle: as a line, and in a notebook as a short table and its report in a frame."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from offramp.bundle.schema.policy import ExitPolicy

if TYPE_CHECKING:
    from offramp.bundle.bundle import Bundle


@dataclass(frozen=True, slots=True)
class BundleReport:
    """The compiler's report as a page, which notebooks show as a cell's last expression."""

    path: Path
    """Path of the report, for a browser."""
    html: str
    """The whole HTML document."""

    def _repr_html_(self) -> str:
        # In a frame, the document's style sheet does not change the notebook's page.
        return (
            f'<iframe srcdoc="{escape(self.html)}" sandbox="" title="report" '
            'style="width: 100%; height: 45em; border: 1px solid #ccc"></iframe>'
        )

    def __repr__(self) -> str:
        return f"<report {self.path}>"


def bundle_html(bundle: Bundle) -> str:
    """Return HTML that shows a bundle: inputs, answers, promise, and the exits in use."""
    manifest, policy = bundle.manifest, bundle.policy
    inputs = ", ".join(spec.describe() for spec in manifest.inputs)
    outputs = ", ".join(spec.describe() for spec in manifest.outputs)
    lines = [str(bundle.path), f"{inputs} → {outputs}", describe_policy(bundle)]
    rows = []
    for active in policy.active:
        exit_ = manifest.exits[active.exit]
        place = f"{exit_.after_segment + 1} of {len(manifest.segments)}"
        threshold = f"{active.threshold:.3f}"
        rows.append((f"exit {active.exit}", place, exit_.head.describe(), threshold))
    return table_html(manifest.name, lines, ("exit", "after segment", "head", "threshold"), rows)


def describe_policy(bundle: Bundle) -> str:
    """Return a line on the exits in use, and on their promise or the reason why none is in use."""
    manifest, policy = bundle.manifest, bundle.policy
    reason = "" if policy.active or not manifest.idle_reason else f": {manifest.idle_reason}"
    exits = f"{len(policy.active)} of {len(manifest.exits)} exits in use"
    return f"{exits}; {describe_promise(policy)}{reason}"


def describe_promise(policy: ExitPolicy) -> str:
    """Return what a policy promises, as text for people."""
    promise = policy.promise
    if not policy.active:
        return "the unmodified model answers"
    if promise is None:  # compiled on random inputs
        return "nothing is certified"
    return (
        f"certified: at most {promise.max_disagreement:.2%} of answers differ from the unmodified "
        f"model's, with {promise.confidence_level:.0%} confidence; predicted to save "
        f"{promise.predicted_savings:.0%} of its time"
    )


def table_html(
    title: str, lines: Iterable[str], head: Sequence[str], rows: Sequence[Sequence[str]]
) -> str:
    """Return HTML of a title, some lines below the title, and a table if there are ``rows``."""
    shown = "".join(f"<div>{escape(line)}</div>" for line in lines)
    table = ""
    if rows:
        cells = "".join(f"<th>{escape(word)}</th>" for word in head)
        body = "".join(
            f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
        )
        table = f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div><b>{escape(title)}</b>{shown}{table}</div>"
