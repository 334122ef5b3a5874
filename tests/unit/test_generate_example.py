"""The example of generated text shows where each token left."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from examples import generate
from examples.generate import ShownToken, legend, shown, summary

ENDS = (2, 4, 8)
ANSWER = [ShownToken("at", 5, 2), ShownToken(" 15", 6, 8), ShownToken(":30", 7, 2),
          ShownToken("", 2, 4)]  # fmt: skip


def test_each_token_has_the_colour_of_its_exit() -> None:
    text = shown(ANSWER, ENDS, colours=True)
    assert text.plain == "at 15:30"
    coloured = {text.plain[span.start : span.end]: span.style for span in text.spans}
    assert coloured["at"] == coloured[":30"] == generate.COLOURS[0]
    assert coloured[" 15"] == generate.END_COLOUR


def test_without_a_terminal_layers_are_below_the_characters() -> None:
    assert shown(ANSWER, ENDS, colours=False).plain == "at 15:30\n22888222"


def test_layers_beyond_the_letters_are_marked() -> None:
    answer = [ShownToken("a", 1, 11), ShownToken("b", 1, 40)]
    assert shown(answer, (11, 40), colours=False).plain == "ab\nb+"


def test_the_legend_has_the_share_of_each_exit() -> None:
    assert legend([ANSWER], ENDS).plain == (
        "exit after layer 2: 50% of tokens   exit after layer 4: 25% of tokens   "
        "the end, layer 8: 25% of tokens"
    )


def test_the_summary_counts_layers_and_equal_answers() -> None:
    other = [*ANSWER[:-1], ShownToken("", 9, 8)]
    assert summary([ANSWER, ANSWER], [ANSWER, other], ENDS) == (
        "8 tokens; 50% of decoder layers run; 1 of 2 answers equal to the full model's"
    )


def test_models_that_are_not_there_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["generate", "--models", str(tmp_path)])
    with pytest.raises(SystemExit):
        generate.main()
    assert "joint is not there; leave --models out to train one" in capsys.readouterr().err
