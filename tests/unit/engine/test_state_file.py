"""Each served name on each host has a state file, and one server at a time writes it."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
from tests.facts import tells
from tests.unit.bundle.examples import write

from offramp.bundle import Bundle
from offramp.engine.common.control_state import load_state
from offramp.engine.common.state_file import StateFile

HERE = {"bundle": "0123"}


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.node", lambda: "one")


def of(folder: Path, name: str = "small") -> StateFile:
    return StateFile.of(folder / "small.ee", name)


def test_the_state_file_is_next_to_its_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: None
) -> None:
    bundle = write(tmp_path)
    expected = bundle.path.resolve().with_name("small.ee.digits@one.state.npz")
    file = StateFile.of(bundle.path, "digits")
    assert file.path == expected
    (tmp_path / "current.ee").symlink_to(bundle.path)
    assert StateFile.of(tmp_path / "current.ee", "digits").path == expected
    monkeypatch.chdir(bundle.path)
    assert StateFile.of(".", "digits").path == expected
    assert file.save({"a": 1}, HERE)
    file.release()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["current.ee", "small.ee", expected.name]
    assert Bundle.open(bundle.path).manifest == bundle.manifest


def test_names_and_hosts_do_not_share_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["a", "b", "A", "a/b", "a%2Fb", "../a", "a@one", "", " ", "ü", "\udcff", "a" * 300]
    names += ["a" * 299 + "b", "Zahl\n"]
    seen = set()
    for host in ("one", "two", "one@two"):
        monkeypatch.setattr("platform.node", lambda host=host: host)
        for name in names:
            file = of(tmp_path, name)
            assert file.path.parent == tmp_path
            assert file.save({"name": len(seen)}, HERE), name
            seen.add(file.path)
            file.release()
    assert len(seen) == len(names) * 3
    assert len(list(tmp_path.iterdir())) == len(seen)


def lines(caplog: pytest.LogCaptureFixture) -> list[int]:
    return [record.levelno for record in caplog.records]


def test_a_second_server_of_the_name_writes_when_the_first_has_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    old, new = of(tmp_path), of(tmp_path)
    assert old.load(HERE) is None
    assert old.save({"by": "old"}, HERE)
    assert caplog.records == []
    assert new.load(HERE) == {"by": "old"}
    assert not new.save({"by": "new"}, HERE)
    assert not new.save({"by": "new"}, HERE)
    assert lines(caplog) == [logging.WARNING]
    tells(caplog.text, f"{old.path}", "another server")
    assert "--model NAME=PATH" in caplog.text
    assert "--no-state" in caplog.text
    assert old.save({"by": "old", "last": True}, HERE)
    old.release()
    assert new.save({"by": "new"}, HERE)
    assert lines(caplog) == [logging.WARNING, logging.INFO]
    assert load_state(old.path, fingerprint=HERE) == {"by": "new"}
    assert not old.save({}, HERE)
    new.release()
    assert list(tmp_path.iterdir()) == [new.path]


def test_other_names_of_the_bundle_are_kept_meanwhile(tmp_path: Path) -> None:
    assert of(tmp_path, "one").save({"a": 1}, HERE)
    held = [of(tmp_path, name) for name in ("two", "three")]
    assert all(file.save({"a": 1}, HERE) for file in held)


HOLDER = """
import sys, time
from offramp.engine.common.state_file import StateFile
file = StateFile.of(sys.argv[1], "small")
assert file.save({"by": "holder"}, {})
print("held", flush=True)
time.sleep(600)
"""


def test_a_server_that_was_killed_holds_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "small.ee")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            file = of(tmp_path)
            assert not file.save({"by": "us"}, {})
        finally:
            holder.kill()
    assert file.load({}) == {"by": "holder"}
    assert file.save({"by": "us"}, {})


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_keeps_states(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fcntl = pytest.importorskip("fcntl")

    def refuse(*_: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    caplog.set_level(logging.INFO)
    files = [of(tmp_path), of(tmp_path)]
    assert all(file.save({"a": index}, HERE) for index, file in enumerate(files))
    assert files[0].load(HERE) == {"a": 1}
    assert [record.levelno for record in caplog.records] == [logging.INFO] * 2  # once a server
    told = f"{files[0].path} cannot be locked ([Errno {number}] {os.strerror(number)}): of two"
    assert all(record.getMessage().startswith(told) for record in caplog.records)


def test_windows_keeps_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offramp.bundle.locks.fcntl", None)
    assert of(tmp_path).save({"a": 1}, HERE)


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    file = of(tmp_path)
    file.path.with_name(file.path.name.replace(".npz", ".lock")).symlink_to(elsewhere)
    assert file.save({"a": 1}, HERE)
    assert not elsewhere.exists()
