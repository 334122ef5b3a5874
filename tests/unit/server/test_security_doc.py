"""The examples of ``docs/security.md`` and ``docs/operations.md`` hold against a server."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.certificates import Authority

from offramp.server.arguments import parse_arguments
from offramp.server.arguments.options import RepositoryControl, SecurityOptions, ServerOptions
from offramp.testing.engine import FakeEngine
from offramp.testing.server import FakeServer

DOCS = Path(__file__).parents[3] / "docs"
TEXT = (DOCS / "security.md").read_text()


def blocks(heading: str, language: str) -> list[str]:
    """Return the blocks of a section."""
    section = TEXT.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


def run(block: str, address: str) -> None:
    """Run a block of Python, with a server's address for the one in it."""
    known, count = re.subn(r'Client\("[^"]+"', f'Client("{address}"', block)
    assert count == 1
    exec(known, {})


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_the_example_of_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    servers, clients = Authority(tmp_path / "servers"), Authority(tmp_path / "clients")
    for name, source in (("ca.pem", servers.ca), ("clients.pem", clients.ca)):
        Path(name).write_bytes(source.read_bytes())
    for authority, name in ((servers, "server"), (clients, "client")):
        for file in authority.issue(name):
            file.rename(file.name)
    (command,), (block,) = blocks("TLS", "sh"), blocks("TLS", "python")
    options = parse_arguments(shlex.split(command)[1:]).server
    assert options.host == "0.0.0.0"
    with FakeServer(FakeEngine(), options) as server:
        run(block, server.address)


def test_the_example_of_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (lines,), (block,) = blocks("Tokens", ""), blocks("Tokens", "python")
    security = SecurityOptions(token_file=write(tmp_path / "tokens", lines))
    with FakeServer(FakeEngine(), ServerOptions(security=security)) as server:
        run(block, server.address)
    (told,) = re.findall(r"print\(error\)  # (.*)", block)
    assert capsys.readouterr().out == f"{told}\n"


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_example_of_admin_methods(tmp_path: Path) -> None:
    (command,) = blocks("Admin methods", "sh")
    (token,) = re.findall(r"Bearer (\w+)", command)
    security = SecurityOptions(admin_token_file=write(tmp_path / "admins", f"root:{token}"))
    with FakeServer(FakeEngine(), ServerOptions(security=security)) as server:
        words = shlex.split(command.replace("localhost:8000", server.url.removeprefix("http://")))
        for shown, status in (words, "200"), ([w.replace(token, "x" * 32) for w in words], "401"):
            done = subprocess.run(
                [*shown, "--silent", "--write-out", "%{http_code}", "--output", "/dev/null"],
                capture_output=True, check=True, text=True, timeout=60,
            )  # fmt: skip
            assert done.stdout == status


def test_the_example_of_a_file(tmp_path: Path) -> None:
    text = (DOCS / "operations.md").read_text()
    (block,) = re.findall(r"```toml\n(\[server\].*?)```", text, re.DOTALL)
    read = parse_arguments([f"--config={write(tmp_path / 'serve.toml', block)}"])
    assert read.server.security.token_file == tmp_path / "tokens"
    assert read.server.security.tls_certificate == tmp_path / "server.pem"
    assert read.server.repository.model_control is RepositoryControl.EXPLICIT
    assert (read.server.host, read.log_format) == ("0.0.0.0", "json")
