"""Content of ``deploy/``: it parses, its commands exist, its metrics and times are the server's."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from offramp.engine.control.controller import Evidence
from offramp.server.arguments import parse_arguments
from offramp.server.arguments.options import ServerOptions
from offramp.server.pages.metrics import render_metrics
from offramp.testing.engine import FakeEngine, fake_control
from offramp.testing.server import FakeServer

DEPLOY = Path(__file__).parents[3] / "deploy"
MANIFESTS = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "offramp.yaml").read_text()))
RULES = yaml.safe_load((DEPLOY / "prometheus" / "rules.yaml").read_text())["groups"][0]["rules"]
DASHBOARD = json.loads((DEPLOY / "grafana" / "offramp.json").read_text())
DOCKERFILE = (DEPLOY / "docker" / "Dockerfile").read_text()
UNIT = (DEPLOY / "systemd" / "offramp.service").read_text()
KUBERNETES = "1.30"
ADDED_BY_PROMETHEUS = {"instance", "pod", "job"}


def manifest(kind: str) -> Any:
    (found,) = [each for each in MANIFESTS if each["kind"] == kind]
    return found


@pytest.mark.parametrize("document", MANIFESTS, ids=lambda each: each["kind"])
def test_manifests_are_those_of_kubernetes(document: Any) -> None:
    kubernetes_validate.validate(document, KUBERNETES, strict=True)


def container() -> Any:
    return manifest("Deployment")["spec"]["template"]["spec"]["containers"][0]


def configured(tmp_path: Path) -> ServerOptions:
    """Return what the config map has the server do."""
    (tmp_path / "eeserve.toml").write_text(manifest("ConfigMap")["data"]["eeserve.toml"])
    arguments = container()["args"]
    assert arguments == ["--config", "/config/eeserve.toml"]
    return parse_arguments(["--config", str(tmp_path / "eeserve.toml")]).server


def test_the_pod_ends_after_the_server_has_drained(tmp_path: Path) -> None:
    options = configured(tmp_path)
    pod = manifest("Deployment")["spec"]["template"]["spec"]
    pause_s = int(container()["lifecycle"]["preStop"]["exec"]["command"][1])
    needed_s = pause_s + options.drain_delay_s + options.shutdown_timeout_s
    assert pod["terminationGracePeriodSeconds"] > needed_s + 5


def test_the_pod_listens_where_it_is_asked(tmp_path: Path) -> None:
    options = configured(tmp_path)
    ports = {each["name"]: each["containerPort"] for each in container()["ports"]}
    assert ports == {"http": options.http_port, "grpc": options.grpc_port}
    assert options.host == "0.0.0.0"
    assert options.repository.model_repository == Path("/models")
    assert {each["targetPort"] for each in manifest("Service")["spec"]["ports"]} == set(ports)
    mounts = {each["mountPath"] for each in container()["volumeMounts"]}
    assert {"/models", "/config", "/tmp"} <= mounts


def test_probes_are_answered() -> None:
    with FakeServer(FakeEngine()) as server:
        paths = [container()[f"{p}Probe"]["httpGet"]["path"] for p in ("startup", "readiness")]
        paths.append(container()["livenessProbe"]["httpGet"]["path"])
        for path in paths:
            check = f"import urllib.request as u; assert u.urlopen('{server.url}{path}').status"
            subprocess.run([sys.executable, "-c", check], check=True, timeout=60)


def test_the_health_check_of_the_image_is_answered() -> None:
    (check,) = re.findall(r'CMD \["python", "-c", "(.*)"\]', DOCKERFILE)
    with FakeServer(FakeEngine()) as server:
        asked = check.replace("http://127.0.0.1:8000", server.url)
        assert asked != check
        assert (
            subprocess.run([sys.executable, "-c", asked], timeout=60, check=False).returncode == 0
        )
        server.engine.given_up = True
        done = subprocess.run(
            [sys.executable, "-c", asked], timeout=60, check=False, capture_output=True
        )
        assert done.returncode != 0


def test_commands_are_those_of_the_server(tmp_path: Path) -> None:
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.MULTILINE)
    (command,) = re.findall(r"^CMD (.*)$", DOCKERFILE, re.MULTILINE)
    assert json.loads(entry) == ["eeserve"]
    assert parse_arguments(json.loads(command)).server.host == "0.0.0.0"
    runtime, service = yaml.safe_load_all((DEPLOY / "kserve" / "serving-runtime.yaml").read_text())
    arguments = runtime["spec"]["containers"][0]["args"]
    (model,) = parse_arguments(
        [each.replace("{{.Name}}", "m") for each in arguments]
    ).models.items()
    assert model == ("m", Path("/mnt/models"))
    assert service["spec"]["predictor"]["model"]["runtime"] == runtime["metadata"]["name"]


def test_the_unit_ends_after_the_server_has_drained() -> None:
    settings = dict(re.findall(r"^(\w+)=(.*)$", UNIT, re.MULTILINE))
    program, *arguments = shlex.split(settings["ExecStart"])
    assert Path(program).name == "eeserve"
    options = parse_arguments(arguments).server
    limit_s = options.drain_delay_s + options.shutdown_timeout_s
    assert int(settings["TimeoutStopSec"]) > limit_s + 5
    assert settings["KillSignal"] == "SIGTERM"


def metrics() -> dict[str, set[str]]:
    """Return the labels of all metrics, by the names of their samples."""
    engine = FakeEngine(control=fake_control(Evidence.CERTIFIED))
    page = render_metrics(engine, {("UNAVAILABLE", "draining"): 1}).decode()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def selectors(expression: str) -> list[Any]:
    """Return the selectors of a PromQL expression; it raises where the expression is none."""
    found: list[Any] = []

    def walk(node: Any) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)
        if isinstance(node, promql_parser.MatrixSelector):
            found.append(node.vector_selector)
        for name in ("expr", "lhs", "rhs"):
            if (child := getattr(node, name, None)) is not None:
                walk(child)
        for child in getattr(node, "args", ()) or ():
            walk(child)

    walk(promql_parser.parse(expression))
    return found


EXPRESSIONS = [rule["expr"] for rule in RULES] + [
    target["expr"].replace("$__rate_interval", "5m").replace("$model", ".*").replace(
        "$instance", ".*"
    )
    for panel in DASHBOARD["panels"]
    for target in panel["targets"]
]  # fmt: skip


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_metrics_and_labels_are_the_servers(expression: str) -> None:
    known = metrics()
    recorded = {rule["record"] for rule in RULES if "record" in rule}
    asked = selectors(expression)
    assert asked
    for selector in asked:
        assert selector.name in known or selector.name in recorded, selector.name
        if selector.name in known:
            labels = {match.name for match in selector.matchers.matchers}
            assert labels <= known[selector.name] | ADDED_BY_PROMETHEUS, expression


def test_the_autoscaler_follows_a_recorded_metric() -> None:
    (metric,) = manifest("HorizontalPodAutoscaler")["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] in {rule.get("record") for rule in RULES}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_takes_the_rules() -> None:
    rules = DEPLOY / "prometheus" / "rules.yaml"
    subprocess.run(["promtool", "check", "rules", rules], check=True, timeout=60)
