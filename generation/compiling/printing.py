"""Final output of compiling a model that generates text."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from offramp.generation.bundle.text_model import TextEvidence
from offramp.generation.compiling.compile_text import CompiledText

_WHAT = {
    "tokens": "a token differs from the model's at the same prefix",
    "texts": "the answer is unlike the model's",
}


def print_compiled(done: CompiledText, console: Console) -> None:
    """Print a summary of the result."""
    path, model = escape(str(done.bundle.path)), done.bundle.model
    say = console.print
    if done.early is None or model.evidence is None:
        say(f"[bold]{path}[/bold]: [bold red]no exit in use[/bold red], it serves the model as it "
            "is", highlight=False, soft_wrap=True)  # fmt: skip
        say(f"  Reason: {escape(done.reason)}.", highlight=False, soft_wrap=True)
    else:
        _print_exits(done, model.evidence, console)
    say(f"Serve:  eeserve {path}", highlight=False, soft_wrap=True)


def _print_exits(done: CompiledText, evidence: TextEvidence, console: Console) -> None:
    early, model = done.early, done.bundle.model
    assert early is not None, "there are exits"
    depths = [depth for text in early.texts for depth in text.depths]
    table = Table(box=box.SIMPLE, title=escape(str(done.bundle.path)), title_justify="left")
    for name in ("tokens leave after layer", "at confidence ≥", "share of tokens"):
        table.add_column(name, justify="right")
    for number, stage in enumerate(model.stages):
        sure = "the model's end" if stage.threshold is None else f"{stage.threshold:.4f}"
        table.add_row(str(stage.end), sure, f"{depths.count(number) / len(depths):.1%}")
    console.print(table)
    unlike = f" ({evidence.dissimilarity})" if evidence.risk == "texts" else ""
    certain = f"with {evidence.confidence_level:.0%} confidence"
    speed = (
        f"{early.tokens_per_s:,.0f} tokens a second, {done.full.tokens_per_s:,.0f} without exits"
    )
    lines = {
        "Promise": f"how often {_WHAT[evidence.risk]}{unlike} is at most {evidence.bound:.2%} "
        f"{certain}; observed {evidence.observed:.2%} on {evidence.prompts:,} prompts",
        "Layers": f"a token runs {evidence.layers_run:.0%} of {len(model.layers)}; skipped layers "
        f"get their keys and values by {model.skipped}",
        "Speed": f"{speed}: ×{done.speedup:.2f}, measured here in steps of at most "
        f"{done.batch} rows",
    }
    for name, line in lines.items():
        console.print(f"{name + ':':8} {escape(line)}.", highlight=False, soft_wrap=True)
