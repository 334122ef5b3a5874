"""A load on a server that asks for certificates and tokens."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
from tests.certificates import Authority
from tests.facts import facts

from offramp.server.arguments.options import SecurityOptions, ServerOptions
from offramp.testing.engine import FakeEngine
from offramp.testing.server import FakeServer
from offramp.tools.bench import cli
from offramp.tools.bench.load.load_settings import LoadError
from offramp.tools.bench.load.server_access import ServerAccess, read_access

TOKEN = "ann-0123456789abcdef"


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


def options(**given: object) -> argparse.Namespace:
    names = ("tls_ca", "tls_certificate", "tls_key", "token_file", "metrics")
    return argparse.Namespace(**{"address": "10.0.0.1:8001", **dict.fromkeys(names), **given})


def test_a_load_shows_certificate_and_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    authority = Authority(tmp_path / "ca")
    certificate, key = authority.issue("client")
    served, served_key = authority.issue()
    security = SecurityOptions(
        tls_certificate=served,
        tls_key=served_key,
        tls_client_ca=authority.ca,
        token_file=write(tmp_path / "tokens", f"ann:{TOKEN}\n"),
    )
    token = write(tmp_path / "token", f"{TOKEN}\n")
    np.savez(tmp_path / "data.npz", x=np.zeros((4, 4), np.float32))
    figures = tmp_path / "figures.json"
    with FakeServer(FakeEngine(), ServerOptions(security=security)) as server:
        words = [
            *("load", server.address, "--model=fake", f"--data={tmp_path / 'data.npz'}"),
            *("--closed-loop=1", "--duration-s=0.5", "--warm-up-s=0", f"--json={figures}"),
            *(f"--tls-ca={authority.ca}", f"--tls-certificate={certificate}", f"--tls-key={key}"),
            *(f"--token-file={token}", f"--metrics={server.url.removeprefix('https://')}"),
        ]
        assert cli.main(words) == 0
        assert server.admission.refused["UNAUTHENTICATED", "unauthenticated"] == 0
        assert cli.main([word for word in words if "token-file" not in word]) != 0
    written = figures.read_text()
    assert json.loads(written)["summary"]["requests"] == len(server.engine.calls) > 0
    assert TOKEN not in written
    assert "a token is needed" in capsys.readouterr().err


def test_a_token_is_sent_in_the_clear_to_this_machine_alone(tmp_path: Path) -> None:
    token = write(tmp_path / "token", TOKEN)
    with pytest.raises(LoadError, match=facts("10.0.0.1:8001", "--tls-ca")):
        read_access(options(token_file=token))
    with pytest.raises(LoadError, match=facts("10.0.0.2:8000", "in the clear")):
        read_access(options(address="[::1]:1", metrics="10.0.0.2:8000", token_file=token))
    access = read_access(options(address="localhost:1", token_file=token))
    assert access == ServerAccess(token=TOKEN)
    assert TOKEN not in repr(access)
    assert read_access(options(tls_ca=tmp_path, token_file=token)).token == TOKEN


@pytest.mark.parametrize("text", ["", f"ann:{TOKEN}", f"{TOKEN}\n{TOKEN}"])
def test_a_file_of_other_things_than_one_token_is_refused(tmp_path: Path, text: str) -> None:
    file = write(tmp_path / "token", text)
    with pytest.raises(LoadError, match="has to hold one token alone") as refused:
        read_access(options(token_file=file))
    assert TOKEN not in str(refused.value)


def test_wrong_certificates_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="--tls-certificate and --tls-key belong together"):
        read_access(options(tls_ca=tmp_path, tls_key=tmp_path))
    file = write(tmp_path / "ca.pem", "no certificate")
    with pytest.raises(LoadError, match=r"authorities .*ca\.pem cannot be used"):
        ServerAccess(ca=file).context()
