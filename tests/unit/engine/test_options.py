"""Options are refused where they could never serve."""

from __future__ import annotations

from typing import Any

import pytest
from tests.facts import Told, facts

from offramp.engine.models.options import EngineOptions, ModelOptions
from offramp.engine.scheduling.policies import PolicyName

CHEAPEST = PolicyName("cheapest")
INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("options", "given", "told"),
    [
        (ModelOptions, {"max_batch_size": 0}, ("max_batch_size is 0", "at least 1")),
        (ModelOptions, {"max_queue_samples": 0}, ("max_queue_samples is 0", "at least 1")),
        (ModelOptions, {"max_queue_delay_ms": -1.0}, ("max_queue_delay_ms is -1.0", "expected")),
        (ModelOptions, {"max_queue_delay_ms": INF}, ("max_queue_delay_ms is inf", "expected")),
        (ModelOptions, {"slo_ms": 0.0}, ("slo_ms is 0.0", "expected")),
        (ModelOptions, {"slo_ms": NAN}, ("slo_ms is nan", "expected")),
        (ModelOptions, {"weight": 0.0}, ("weight is 0.0", "expected")),
        (ModelOptions, {"weight": INF}, ("weight is inf", "expected")),
        (ModelOptions, {"max_queue_delay_ms": 50.0, "slo_ms": 20.0}, ("well below it",)),
        (ModelOptions, {"max_source_share": 0.0}, ("max_source_share", "above 0 and at most 1")),
        (ModelOptions, {"max_source_share": 1.5}, ("max_source_share", "above 0 and at most 1")),
        (ModelOptions, {"max_source_share": NAN}, ("max_source_share", "above 0 and at most 1")),
        (ModelOptions, {"scheduling": CHEAPEST, "forced_exits": False}, ("cheapest forces exits",)),
        (EngineOptions, {"streams": 0}, ("streams is 0", "at least 1")),
        (EngineOptions, {"threads": 0}, ("threads is 0", "at least 1")),
        (EngineOptions, {"parallel_below": 0}, ("parallel_below is 0", "at least 1")),
        (EngineOptions, {"max_violations": 0.0}, ("max_violations is 0.0", "share")),
        (EngineOptions, {"max_violations": 1.0}, ("max_violations is 1.0", "share")),
        (EngineOptions, {"max_violations": -0.5}, ("max_violations is -0.5", "share")),
        (EngineOptions, {"parallel_below": 2, "max_violations": 0.1}, ("not both",)),
        (EngineOptions, {"precision": "fp8"}, ("'fp8'", "fp32, tf32, fp16, int8")),
    ],
)
def test_what_could_never_serve_is_refused(options: type, given: Any, told: Told) -> None:
    with pytest.raises(ValueError, match=facts(*told)):
        options(**given)


def test_more_threads_than_cores_are_refused_on_the_cpu_only() -> None:
    with pytest.raises(ValueError, match="4 streams × 1000 threads"):
        EngineOptions(backend="onnxruntime", streams=4, threads=1000)
    assert EngineOptions(backend="tensorrt", streams=4, threads=1000).threads_per_stream() == 1000


def test_a_model_has_its_own_options_or_the_defaults() -> None:
    own = ModelOptions(scheduling=PolicyName.parse("slackfit"), slo_ms=20.0)
    options = EngineOptions(models={"a": own})
    assert options.of("a") is own
    assert options.of("b") is options.defaults


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (ModelOptions, "max_batch_size"),
        (ModelOptions, "max_queue_samples"),
        (EngineOptions, "streams"),
        (EngineOptions, "threads"),
        (EngineOptions, "parallel_below"),
    ],
)
def test_what_would_exhaust_the_machine_is_refused(options: type, field: str) -> None:
    for value in (2**40, 10**400):
        with pytest.raises(ValueError, match=rf"{field} is 1\d+, expected at most \d+$") as caught:
            options(**{field: value})
        assert len(str(caught.value)) < 150
