"""``eeworker`` refuses unsafe or impossible options, each in one line; and ends when asked."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cluster.remote.listening import GOLDEN, HELLO, TOKEN, Worker
from tests.facts import Told, tells

from offramp.cluster.remote.eeworker import ILLEGAL, main, make_parser, serving_words
from offramp.cluster.remote.tcp import parse_address
from offramp.cluster.remote.tcp_launcher import TcpLauncher
from offramp.commands.combinations import Illegal
from offramp.engine.common.errors import BackendError
from offramp.engine.common.network import NetworkError


@pytest.fixture
def token(tmp_path: Path) -> str:
    path = tmp_path / "token"
    path.write_bytes(TOKEN)
    return f"--token-file={path}"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--listen=0.0.0.0:0"], ("--listen 0.0.0.0:0", "open to other hosts")),
        (["--listen=worker:7070"], ("--listen worker:7070", "open to other hosts")),
        (["--listen=7070"], ("'7070'", "HOST:PORT", "0 to 65535")),
        (
            ["--listen=0.0.0.0:0", "--tls-cert=no", "--tls-key=no"],
            ("certificate no", "key no", "No such file or directory", "PEM"),
        ),
        (["--listen=127.0.0.1:0", "--token-file=no"], ("no: No such file or directory",)),
        (
            ["--listen=127.0.0.1:0", "--token-file=/dev/null"],
            ("/dev/null", "pipe or a device", "regular file"),
        ),
    ],
)
def test_what_is_unsafe_or_wrong_is_said_in_a_line(
    words: list[str], told: Told, token: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([str(GOLDEN), token, *words]) == 1
    error = capfd.readouterr().err
    tells(error, "eeworker: ", *told)
    assert error.count("\n") == 1


def test_it_does_not_start_without_a_token(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(GOLDEN), "--listen=127.0.0.1:0"])
    assert ended.value.code == 2
    assert "required: --token-file" in capfd.readouterr().err


def test_an_occupied_port_is_reported(token: str, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main([str(GOLDEN), token, f"--listen=127.0.0.1:{port}"]) == 1
    told = f"eeworker: cannot listen on 127.0.0.1:{port}: Address already in use; use another"
    assert capfd.readouterr().err.startswith(told)


def test_a_folder_that_is_no_bundle_is_reported(token: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-P", "-m", "offramp.cluster.remote.eeworker"),
            *(str(tmp_path), token, "--listen=127.0.0.1:0"),
        ],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(rf"eeworker: {tmp_path} is not a bundle.*\n", done.stderr)


@pytest.mark.parametrize(
    "words", [["--", "a.ee", "b.ee"], ["a.ee", "b.ee"], ["a.ee", "--", "b.ee"]]
)
def test_the_process_that_serves_is_told_so_whatever_the_words(words: list[str]) -> None:
    given = make_parser().parse_args(
        serving_words(["--listen=127.0.0.1:0", "--token-file", "t", *words], (5, 7))
    )
    assert given.serve_fds == [5, 7]
    assert given.bundles == [Path("a.ee"), Path("b.ee")]


def test_it_ends_when_it_is_told_and_refuses_another_backend(tmp_path: Path) -> None:
    worker = Worker(tmp_path, "--backend=onnxruntime")
    try:
        told = "was started with --backend onnxruntime, and the server asks for 'scripted'; use"
        with pytest.raises(BackendError, match=told):
            TcpLauncher(worker.address, TOKEN, None).start(HELLO)
    finally:
        assert worker.stop() == 0
    tells(worker.said(), "refused", "--backend onnxruntime")
    with pytest.raises(BackendError, match="Connection refused"):
        TcpLauncher(worker.address, TOKEN, None).start(HELLO)


@pytest.mark.parametrize("text", ["", ":1", "a:", "a:x", "a:65536", "a:0", "::1:7", "[a]:7"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(NetworkError, match="is not an address, expected HOST:PORT"):
        parse_address(text)


@pytest.mark.parametrize(
    ("text", "loopback"),
    [("127.0.0.1:7", True), ("[::1]:7", True), ("localhost:7", True), ("10.0.0.1:7", False)],
)
def test_addresses_are_read_and_shown(text: str, loopback: bool) -> None:
    address = parse_address(text)
    assert (str(address), address.is_loopback) == (text, loopback)


@pytest.mark.parametrize("row", ILLEGAL, ids=lambda row: row.option)
def test_a_combination_that_is_refused(row: Illegal, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"{row.option}=x"] if row.option != "--insecure" else [row.option]
    words += [f"{row.other}=x", "--tls-key=x"] if row.other else []
    with pytest.raises(SystemExit) as ended:
        main([str(GOLDEN), "--listen=127.0.0.1:0", "--token-file=t", *words])
    assert ended.value.code == 2
    other = f"with {row.other}" if row.other else f"without {row.without}"
    told = f"eeworker: error: {row.option} {other}: {row.why}\nsee eeworker --help\n"
    assert capsys.readouterr().err == told
