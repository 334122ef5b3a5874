"""The text that a person reads."""

from __future__ import annotations

import io
import re

from rich.console import Console
from tests import models

from offramp.compiler.commands.looking import print_inspection
from offramp.compiler.cuts.cuts import find_cuts


def test_inspection_shows_cut_points_and_reasons(read):
    model = read(models.bert_like())
    out = io.StringIO()

    print_inspection(model, find_cuts(model), Console(file=out, width=160))

    text = out.getvalue()
    assert "input_ids: int64 [batch, sequence]" in text
    row = next(line for line in text.splitlines() if "layer1/out" in line and "66." in line)
    assert re.split(r"\s{2,}", row.strip()) == [
        "3",
        "layer1/out",
        "[batch, sequence, 16]",
        "LayerNormalization",
        "66.7%",
        "attention_mask",
    ]
    assert "no work is done yet" in text


def test_brackets_in_names_are_text_not_markup(read):
    proto = models.mlp()
    for node in proto.graph.node:
        for names in (node.input, node.output):
            for i, name in enumerate(names):
                if name == "hidden0":
                    names[i] = "h[bold]0"
    model = read(proto)
    out = io.StringIO()

    print_inspection(model, find_cuts(model), Console(file=out, width=160))

    assert "h[bold]0" in out.getvalue()
