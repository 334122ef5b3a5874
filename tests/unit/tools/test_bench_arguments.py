"""The command line of eebench: illegal combinations row by row, and values that are refused."""

from __future__ import annotations

import itertools

import pytest
from tests.facts import Told, tells

from offramp.commands.combinations import Illegal
from offramp.tools.bench import load_command, simulate_command
from offramp.tools.bench.cli import main, make_parser

NEEDED = {
    "compare": ["m.ee", "--data=d.npz"],
    "load": ["host:1", "--model=m", "--data=d.npz"],
    "simulate": ["m.ee"],
}
TABLES = {
    "load": load_command.ILLEGAL,
    "simulate": simulate_command.ILLEGAL,
}
ROWS = [*itertools.chain.from_iterable([(c, r) for r in t] for c, t in TABLES.items())]
VALUES = {"--trace": "poisson", "--no-deadline": ""}
"""Values, which may be the defaults; of other options 0.5 or 1."""
NUMBERS = ("--confidence", "--rate", "--base-rate", "--cv2", "--rate-to", "--acceleration")


def word(flag: str) -> str:
    if " " in flag:
        return flag.replace(" ", "=")
    value = VALUES.get(flag, "0.5" if flag in NUMBERS else "1")
    return f"{flag}={value}" if value else flag


@pytest.mark.parametrize(("command", "row"), ROWS, ids=lambda part: getattr(part, "option", part))
def test_a_row_is_refused(command: str, row: Illegal, capsys: pytest.CaptureFixture[str]) -> None:
    other = [word(row.other)] if row.other else []
    with pytest.raises(SystemExit) as stopped:
        make_parser().parse_args([command, *NEEDED[command], word(row.option), *other])
    assert stopped.value.code == 2
    other = f"with {row.other}" if row.other else f"without {row.without}"
    line, see = capsys.readouterr().err.splitlines()
    tells(line, f"eebench {command}", f"{row.option} {other}", row.why)
    assert see == f"see eebench {command} --help"
    excused = [word(row.without)] if row.without else []
    assert make_parser().parse_args([command, *NEEDED[command], word(row.option), *excused]).run


@pytest.mark.parametrize("command", NEEDED)
def test_what_is_needed_is_enough(command: str) -> None:
    assert make_parser().parse_args([command, *NEEDED[command]]).run


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["compare", "m.ee", "--data=d", "--rounds=0"], ("'0'", "whole number from 1")),
        (["compare", "m.ee", "--data=d", "--rounds=x"], ("'x'", "whole number from 1")),
        (["compare", "m.ee", "--data=d", "--batch-sizes=1,x"], ("'x'", "whole number from 1")),
        (["simulate", "m.ee", "--audit-probability=x"], ("'x'", "above 0, at most 1")),
        (["simulate", "m.ee", "--polcy=delay"], ("--polcy", "--policy")),
        (["simulat", "m.ee"], ("invalid choice: 'simulat'",)),
    ],
)
def test_what_is_wrong_is_told_in_a_line(
    words: list[str], told: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    line, see = capsys.readouterr().err.splitlines()
    tells(line, *told)
    assert see.startswith("see eebench")
