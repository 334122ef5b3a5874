"""The limits that docs/security.md tells are those that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from offramp.cluster.remote import eeworker
from offramp.cluster.remote.listening import ADMIT_LIMIT_S, MOST_UNKNOWN
from offramp.engine.models.options import ModelOptions
from offramp.proto import request_bytes, tensors
from offramp.server.arguments.command_line import make_parser
from offramp.server.arguments.options import ServerOptions
from offramp.server.ports.grpc_listener import MAX_CALLS
from offramp.server.ports.sockets import HANDSHAKE_S
from offramp.server.requests.receiving import ARRIVAL_S
from offramp.server.requests.streaming import MAX_IN_FLIGHT

TEXT = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([^|]+) \| (\d+)(?: \w+)? \| (?:`(--[\w-]+)`|–) \|", TEXT, re.MULTILINE)
FIXED = {
    "requests of one stream being answered": MAX_IN_FLIGHT,
    "fields of a request": request_bytes.MAX_FIELDS,
    "a request without its tensors' elements": request_bytes.MAX_HEAD_BYTES // 1024,
    "elements sent as typed fields, but floats": request_bytes.MAX_TYPED_BYTES // 2**20,
    "dimensions of a tensor": tensors.MAX_DIMENSIONS,
    "calls of a connection": MAX_CALLS,
    "time for a call's message to arrive": ARRIVAL_S,
    "connections to a worker that have not proved the token": MOST_UNKNOWN,
    "time for a TLS handshake": HANDSHAKE_S,
    "time for a connection to a worker to prove the token": ADMIT_LIMIT_S,
}


@pytest.mark.parametrize(("what", "told", "flag"), ROWS)
def test_a_limit_is_as_told(what: str, told: str, flag: str) -> None:
    if not flag:
        assert FIXED[what] == int(told)
        return
    field = flag.removeprefix("--").replace("-", "_")
    options = ServerOptions() if hasattr(ServerOptions(), field) else ModelOptions()
    assert getattr(options, field) == float(told)


def test_every_limit_is_read() -> None:
    assert len(ROWS) >= 11
    assert {what for what, _, flag in ROWS if not flag} == FIXED.keys()


def test_flags_are_those_of_the_command_lines() -> None:
    known = make_parser().format_help_all() + eeworker.make_parser().format_help()
    for flag in set(re.findall(r"`(--[\w-]+)", TEXT)):
        assert re.search(rf"{flag}\s", known), flag
