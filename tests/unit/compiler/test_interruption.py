"""Signals end a command in order, and what they say of the target is true."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.unit.bundle.examples import write

from offramp.compiler.commands.interruption import (
    SignalledError,
    Target,
    raising_signals,
    status_of,
)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_what_is_done(number: signal.Signals) -> None:
    with pytest.raises(SignalledError) as stopped, raising_signals():
        os.kill(os.getpid(), number)
        assert signal.getsignal(number) is signal.SIG_DFL
    assert signal.getsignal(number) is signal.SIG_DFL
    assert str(stopped.value) == f"stopped by {number.name}"
    assert status_of(stopped.value) == 128 + number


def test_ctrl_c_has_its_own_status() -> None:
    assert status_of(KeyboardInterrupt()) == 130


def test_a_signal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with raising_signals():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_was_written_is_told(tmp_path: Path) -> None:
    path = tmp_path / "small.ee"
    target = Target(path)
    assert target.describe(KeyboardInterrupt()) == "interrupted; nothing was written"
    write(tmp_path)
    whole = f"{path} is written completely"
    assert target.describe(KeyboardInterrupt()) == f"interrupted; {whole}"
    again = Target(path)
    assert again.describe(SignalledError(15)) == "stopped by SIGTERM; nothing was written"
    write(tmp_path, overwrite=True)
    assert again.describe(SignalledError(15)) == f"stopped by SIGTERM; {whole}"
