from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

from offramp.bundle.optional_imports import optional_import


class ToldError(Exception):
    pass


def test_a_package_that_is_not_installed_is_named_with_the_remedy() -> None:
    with (
        pytest.raises(ToldError, match=r"^the Python package absent_one is not installed: get it$"),
        optional_import("absent_one", install="get it", raises=ToldError),
    ):
        import_module("absent_one.part")


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        ("ImportError('no lib.so')", "ImportError: no lib.so"),
        ("OSError('no lib.so')", "OSError: no lib.so"),
        ("RuntimeError('no HOME')", "RuntimeError: no HOME"),
        ("KeyError('getpwuid(): uid not found')", "uid not found"),
        ("ModuleNotFoundError('No module named x', name='x')", "No module named x"),
    ],
)
def test_every_error_of_an_import_becomes_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: str, told: str
) -> None:
    (tmp_path / "broken_one.py").write_text(f"raise {raised}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_one", raising=False)
    with (
        pytest.raises(ToldError, match="broken_one cannot be imported") as caught,
        optional_import("broken_one", install="get it", raises=ToldError),
    ):
        import_module("broken_one")
    assert told in str(caught.value)
    assert str(caught.value).endswith("install it again: get it")
    assert "\n" not in str(caught.value)


def test_an_interrupt_stays_an_interrupt() -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        optional_import("any_one", install="get it", raises=ToldError),
    ):
        raise KeyboardInterrupt
