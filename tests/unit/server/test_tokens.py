"""Tokens: who may call what, over gRPC, the protocol over HTTP, and the pages."""

from __future__ import annotations

import json
import logging
import queue
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tests.facts import Told, facts, tells

from offramp.client import (
    AuthenticationError,
    Client,
    PermissionDeniedError,
    UnknownModelError,
)
from offramp.proto import messages
from offramp.proto.descriptors import FILE, SERVICE, method_path
from offramp.server.arguments.options import SecurityOptions, ServerOptions
from offramp.server.common.errors import ForbiddenError, StartError, UnauthenticatedError
from offramp.server.rest.routes import ROUTES
from offramp.server.security.access import ADMIN_METHODS, OPEN_METHODS, AccessRules, is_local
from offramp.server.security.tokens import TokenFile
from offramp.testing.engine import FakeEngine
from offramp.testing.server import FakeServer

X = np.zeros((1, 4), np.float32)
ANN, BOB, EVE, ROOT = (f"{name}-0123456789abcdef" for name in ("ann", "bob", "eve", "root"))
"""Tokens: for all models, for a missing model, of no user, and of an operator."""
TEXT = f"# people\n\nann:{ANN}\nbob : {BOB} : other, one\n"
LOOPBACK, REMOTE = "ipv4:127.0.0.1:5000", "ipv4:10.0.0.7:5000"
Guarded: TypeAlias = FakeServer[FakeEngine]


def write(path: Path, text: str) -> Path:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.chmod(0o600)
    new.replace(path)
    return path


@pytest.fixture
def users(tmp_path: Path) -> Path:
    return write(tmp_path / "tokens", TEXT)


@pytest.fixture
def guarded(users: Path) -> Iterator[Guarded]:
    """A server that asks for tokens, on both ports."""
    admins = write(users.with_name("admins"), f"root:{ROOT}\n")
    security = SecurityOptions(token_file=users, admin_token_file=admins)
    with FakeServer(FakeEngine(), ServerOptions(security=security)) as server:
        yield server


def infer(server: Guarded, token: str | None, model: str = "fake") -> int:
    with Client(server.address, token=token) as client:
        return len(client.infer(model, {"x": X}).exits)


def stream(server: Guarded, token: str | None, model: str = "fake") -> int:
    with Client(server.address, token=token) as client:
        return len(list(client.infer_stream(model, {"x": X})))


def ask(
    server: Guarded, path: str, token: str | None = None, body: object = None
) -> tuple[int, str]:
    """Return status and body of a route."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{server.url}{path}", data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


BODY = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [0, 0, 0, 0]}]}
INFER = "/v2/models/fake/infer"


def call(server: Guarded, method: str, token: str | None) -> grpc.StatusCode:
    """Return the code that a method answers with to an empty message."""
    metadata = () if token is None else (("authorization", f"Bearer {token}"),)
    with grpc.insecure_channel(server.address) as channel:
        asked = channel.unary_unary(method_path(method))(b"", metadata=metadata, timeout=30)
        return grpc.StatusCode.OK if isinstance(asked, bytes) else grpc.StatusCode.UNKNOWN


def code_of(server: Guarded, method: str, token: str | None) -> grpc.StatusCode:
    try:
        return call(server, method, token)
    except grpc.RpcError as error:
        return error.code()


def test_a_right_token_is_answered(guarded: Guarded) -> None:
    for token in (ANN, ROOT):
        assert infer(guarded, token) == 1
        assert stream(guarded, token) >= 1
        assert ask(guarded, INFER, token, BODY)[0] == 200


@pytest.mark.parametrize(
    ("token", "told"), [(None, "a token is needed"), (EVE, "the token is not valid")]
)
def test_no_or_another_token_is_refused(guarded: Guarded, token: str | None, told: str) -> None:
    for ask_by_grpc in (infer, stream):
        with pytest.raises(AuthenticationError, match=told):
            ask_by_grpc(guarded, token)
    status, text = ask(guarded, INFER, token, BODY)
    assert (status, told in text) == (401, True)
    assert guarded.engine.calls == []


def test_every_method_but_probes_needs_a_token(guarded: Guarded) -> None:
    methods = [method.name for method in FILE.services_by_name[SERVICE.split(".")[1]].methods]
    assert set(methods) > ADMIN_METHODS
    for method in methods:
        expected = "OK" if method in OPEN_METHODS else "UNAUTHENTICATED"
        assert code_of(guarded, method, None).name == expected, method


def test_every_route_but_probes_needs_a_token(guarded: Guarded) -> None:
    routes = {route.path.format(model="fake", version="1", region="r") for route in ROUTES}
    pages = {"/", "/metrics", "/health/live", "/health/ready", "/nothing", "/v2/nothing"}
    open_paths = {"/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready"}
    for path in routes | pages:
        assert (ask(guarded, path)[0] == 200) is (path in open_paths), path
        assert (ask(guarded, path)[0] == 401) is (path not in open_paths), path
        assert ask(guarded, f"{path}?x=/health/live")[0] != 200 or path in open_paths


@pytest.mark.parametrize(
    "path", ["/health/live/..", "//metrics", "/%6detrics", "/health/../metrics"]
)
def test_other_spellings_of_paths_open_nothing(guarded: Guarded, path: str) -> None:
    assert ask(guarded, path)[0] == 401


def test_health_needs_no_token_but_names_of_models_do(guarded: Guarded) -> None:
    with grpc.insecure_channel(guarded.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest()
        assert health.Check(request, timeout=30).status == health_pb2.HealthCheckResponse.SERVING
        watch = health.Watch(request, timeout=30)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        with pytest.raises(grpc.RpcError) as refused:
            list(reflection.ServerReflectionInfo(iter([asked]), timeout=30))
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        metadata = (("authorization", f"Bearer {BOB}"),)
        (answer,) = reflection.ServerReflectionInfo(iter([asked]), timeout=30, metadata=metadata)
        assert SERVICE in [each.name for each in answer.list_services_response.service]


def test_a_token_of_another_model_is_refused_by_name(guarded: Guarded) -> None:
    told = "model 'fake' is refused: token 'bob' is for one, other alone"
    for ask_by_grpc in (infer, stream):
        with pytest.raises(PermissionDeniedError, match=told):
            ask_by_grpc(guarded, BOB)
        with pytest.raises(UnknownModelError):
            ask_by_grpc(guarded, BOB, "other")
    with Client(guarded.address, token=BOB) as client:
        with pytest.raises(PermissionDeniedError, match=told):
            client.metadata("fake")
        with pytest.raises(PermissionDeniedError, match=told):
            client.model_ready("fake")
        assert client.model_ready("other") is False
    for path in (INFER, "/v2/models/fake", "/v2/models/fake/stats", "/v2/models/fake/config"):
        status, text = ask(guarded, path, BOB, BODY if path == INFER else None)
        assert (status, json.loads(text)["error"]) == (403, told)
    assert guarded.engine.calls == []


def test_a_token_of_some_models_sees_no_list_of_all(guarded: Guarded) -> None:
    assert code_of(guarded, "ServerMetadata", BOB) is grpc.StatusCode.OK
    for method in ("ModelStatistics", "RepositoryIndex", "SystemSharedMemoryStatus"):
        assert code_of(guarded, method, BOB) is grpc.StatusCode.PERMISSION_DENIED
        assert code_of(guarded, method, ANN) is grpc.StatusCode.OK
    for path in ("/", "/metrics"):
        assert ask(guarded, path, BOB)[0] == 403
        assert ask(guarded, path, ANN)[0] == 200


def test_a_revoked_token_is_refused_at_once(guarded: Guarded, users: Path) -> None:
    assert infer(guarded, ANN) == 1
    write(users, f"eve:{EVE}\n")
    with pytest.raises(AuthenticationError):
        infer(guarded, ANN)
    assert ask(guarded, INFER, ANN, BODY)[0] == 401
    assert infer(guarded, EVE) == 1
    assert ask(guarded, INFER, EVE, BODY)[0] == 200


def test_requests_of_an_open_stream_are_refused_once_its_token_is_revoked(
    guarded: Guarded, users: Path
) -> None:
    request = messages.ModelInferRequest(model_name="fake")
    request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    request.raw_input_contents.append(X.tobytes())
    sent: queue.SimpleQueue[messages.ModelInferRequest | None] = queue.SimpleQueue()
    with grpc.insecure_channel(guarded.address) as channel:
        open_stream = channel.stream_stream(
            method_path("ModelStreamInfer"),
            request_serializer=messages.ModelInferRequest.SerializeToString,
            response_deserializer=messages.ModelStreamInferResponse.FromString,
        )
        metadata = (("authorization", f"Bearer {ANN}"),)
        answers = open_stream(iter(sent.get, None), metadata=metadata, timeout=30)
        sent.put(request)
        assert next(answers).error_message == ""
        write(users, f"eve:{EVE}\n")
        sent.put(request)
        sent.put(None)
        assert [answer.error_message for answer in answers] == ["token 'ann' was revoked"]


def test_admin_methods_need_an_admin_token(guarded: Guarded) -> None:
    denied = grpc.StatusCode.PERMISSION_DENIED
    for method in ADMIN_METHODS:
        assert code_of(guarded, method, ANN) is denied
        assert code_of(guarded, method, ROOT) is not denied
    assert code_of(guarded, "LogSettings", ROOT) is grpc.StatusCode.OK
    admin = [route for route in ROUTES if route.method in ADMIN_METHODS]
    assert {route.method for route in admin} == ADMIN_METHODS
    for route in admin:
        path = route.path.format(model="fake", version="1", region="r")
        body = {} if route.verb == "POST" else None
        status, text = ask(guarded, path, ANN, body)
        assert status == 403
        tells(text, "'ann'", "--admin-token-file")
        assert ask(guarded, path, ROOT, body)[0] not in {401, 403}


def test_without_an_admin_file_users_change_nothing(users: Path) -> None:
    rules = AccessRules(SecurityOptions(token_file=users))
    with pytest.raises(ForbiddenError, match="use one of --admin-token-file"):
        rules.admit("LogSettings", LOOPBACK, [f"Bearer {ANN}"])


def test_an_admin_file_alone_guards_the_admin_methods_alone(tmp_path: Path) -> None:
    admins = write(tmp_path / "admins", f"root:{ROOT}\nann:{ANN}:fake\n")
    rules = AccessRules(SecurityOptions(admin_token_file=admins))
    assert rules.admit("ModelInfer", REMOTE, []) is None
    with pytest.raises(UnauthenticatedError, match="TraceSetting needs a token of --admin-token"):
        rules.admit("TraceSetting", LOOPBACK, [])
    assert rules.admit("TraceSetting", REMOTE, [f"Bearer {ROOT}"]) is not None
    limited = rules.admit("RepositoryModelLoad", REMOTE, [f"bearer {ANN}"])
    load = messages.RepositoryModelLoadRequest(model_name="fake")
    rules.check_message(limited, "RepositoryModelLoad", load)
    load.model_name = "other"
    with pytest.raises(ForbiddenError, match="model 'other' is refused: token 'ann'"):
        rules.check_message(limited, "RepositoryModelLoad", load)


def test_without_files_only_this_machine_changes_the_server() -> None:
    rules = AccessRules()
    assert rules.admit("ModelInfer", REMOTE, []) is None
    for method in ADMIN_METHODS:
        assert rules.admit(method, LOOPBACK, []) is None
        with pytest.raises(ForbiddenError, match=f"{method} changes the server.*--admin-token-fi"):
            rules.admit(method, REMOTE, [])


@pytest.mark.parametrize(
    ("peer", "local"),
    [
        (LOOPBACK, True),
        ("ipv6:[::1]:5000", True),
        ("ipv6:%5B::1%5D:5000", True),
        ("ipv6:[::ffff:127.0.0.1]:5000", True),
        ("unix:", True),
        (REMOTE, False),
        ("ipv6:%5Bfe80::1%25eth0%5D:5000", False),
        ("ipv4:localhost.example:5000", False),
        ("", False),
    ],
)
def test_peers_of_this_machine(peer: str, local: bool) -> None:
    assert is_local(peer) is local


def test_secrets_are_never_logged_or_answered(
    guarded: Guarded, users: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answers = []
    with caplog.at_level(logging.DEBUG):
        for token in (ANN, BOB, EVE):
            try:
                infer(guarded, token)
            except (AuthenticationError, PermissionDeniedError) as error:
                answers.append(str(error))
            answers.append(ask(guarded, INFER, token, BODY)[1])
        write(users, f"{EVE}\n")
        assert infer(guarded, ANN) == 1
    assert len(answers) == 5
    said = "\n".join(
        [*answers, caplog.text, repr(guarded.admission.access.identify([f"Bearer {ANN}"]))]
    )
    assert "refused (UNAUTHENTICATED, unauthenticated)" in said
    assert "refused (PERMISSION_DENIED, forbidden)" in said
    assert "line 1: expected NAME:TOKEN" in said
    for token in (ANN, BOB, EVE, ROOT):
        assert token not in said


def test_refusals_are_counted(guarded: Guarded) -> None:
    for token in (None, EVE):
        with pytest.raises(AuthenticationError):
            infer(guarded, token)
        ask(guarded, INFER, token, BODY)
    with pytest.raises(PermissionDeniedError):
        infer(guarded, BOB)
    ask(guarded, "/metrics", BOB)
    lines = ask(guarded, "/metrics", ROOT)[1].splitlines()
    counted = [line for line in lines if "unauthenticated" in line or "forbidden" in line]
    assert [line.rpartition(" ")[2] for line in counted] == ["4.0", "2.0"]


@pytest.mark.parametrize(
    ("headers", "told"),
    [
        ([f"Basic {ANN}"], "not one bearer token"),
        ([f"Bearer {ANN}", f"Bearer {ANN}"], "not one bearer token"),
        (["Bearer"], "the token is not valid"),
        (["Bearer ä"], "the token is not valid"),
        ([""], "not one bearer token"),
    ],
)
def test_other_headers_are_refused(users: Path, headers: list[str], told: str) -> None:
    rules = AccessRules(SecurityOptions(token_file=users))
    with pytest.raises(UnauthenticatedError, match=told):
        rules.identify(headers)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", ("no token", "NAME:TOKEN")),
        (ANN, ("line 1: expected NAME:TOKEN",)),
        (f"\n:{ANN}", ("line 2: expected NAME:TOKEN",)),
        ("ann:short", ("line 1", "token is invalid", "16 to 512 letters", "secrets")),
        (f"ann:{ANN}:", ("no model follows the second colon",)),
        (f"ann:{ANN}\nbob:{ANN}", ("line 2", "twice")),
    ],
)
def test_wrong_files_of_tokens_end_the_start(tmp_path: Path, text: str, told: Told) -> None:
    path = write(tmp_path / "tokens", text)
    with pytest.raises(StartError, match=facts(*told)) as refused:
        TokenFile(path)
    assert str(path) in str(refused.value)
    assert ANN not in str(refused.value)


def test_a_missing_file_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=facts("No such file or directory", "expected")):
        TokenFile(tmp_path / "tokens")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_file_that_others_may_read_ends_the_start(users: Path, mode: int) -> None:
    users.chmod(mode)
    with pytest.raises(StartError, match=rf"\(mode {mode:04o}\); run: chmod 600 {users}"):
        TokenFile(users)


def test_the_group_may_read_a_file_of_another_owner(
    users: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: users.stat().st_uid + 1)
    users.chmod(0o440)
    assert TokenFile(users).find(ANN) is not None
    for mode in (0o460, 0o444):
        users.chmod(mode)
        with pytest.raises(StartError, match="chmod 600"):
            TokenFile(users)


def test_two_tokens_may_have_one_name_while_they_are_exchanged(tmp_path: Path) -> None:
    tokens = TokenFile(write(tmp_path / "tokens", f"ann:{ANN}\nann:{EVE}\n"))
    found = [tokens.find(token) for token in (ANN, EVE, BOB)]
    assert [each and each.name for each in found] == ["ann", "ann", None]
