"""``docs/protocol.md`` has every method and every route, and its example is answered."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.protocol_table import DOCUMENT, REMARKS, with_tables

from offramp.proto.descriptors import FILE

TEXT = DOCUMENT.read_text()


def test_the_tables_are_those_of_schema_and_routes() -> None:
    assert with_tables(TEXT) == TEXT, "run python -m tests.protocol_table"


def test_every_method_has_a_remark() -> None:
    methods = FILE.services_by_name["GRPCInferenceService"].methods_by_name
    assert set(REMARKS) == set(methods)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_example_is_answered(served: Any, tmp_path: Path) -> None:
    (body,) = re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)
    (command,) = re.findall(r"```sh\ncurl (.*?)\n```", TEXT, re.DOTALL)
    (tmp_path / "request.json").write_text(body)
    arguments = command.replace("localhost:8000", served.url.removeprefix("http://")).split()
    done = subprocess.run(
        ["curl", "--silent", *arguments], cwd=tmp_path, capture_output=True, check=True, timeout=60
    )
    answer = json.loads(done.stdout)
    assert (answer["id"], answer["outputs"][0]["data"]) == ("1", ["3.000000:2", "2.000000:1"])
