"""Options are refused where they could never serve."""

from __future__ import annotations

import pytest

from offramp.engine.models.options import EngineOptions, ModelOptions
from offramp.engine.scheduling.policies import PolicyName


@pytest.mark.parametrize("field", ["max_batch_size", "max_queue_samples"])
def test_a_model_needs_room(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} is 0, expected at least 1"):
        ModelOptions(**{field: 0})  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["streams", "threads", "parallel_below"])
def test_an_engine_needs_something_to_run_on(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} is 0, expected at least 1"):
        EngineOptions(**{field: 0})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_queue_delay_ms", -1.0),
        ("max_queue_delay_ms", float("inf")),
        ("slo_ms", 0.0),
        ("slo_ms", float("nan")),
        ("weight", 0.0),
        ("weight", float("inf")),
    ],
)
def test_times_and_weights_are_finite_and_not_negative(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value}, expected"):
        ModelOptions(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5])
def test_the_violation_ratio_is_a_share(share: float) -> None:
    with pytest.raises(ValueError, match=r"max_violations is .*, expected a share"):
        EngineOptions(max_violations=share)


def test_tau_b_is_given_or_follows() -> None:
    with pytest.raises(ValueError, match="not both"):
        EngineOptions(parallel_below=2, max_violations=0.1)


def test_a_precision_is_a_known_one() -> None:
    with pytest.raises(ValueError, match="no precision 'fp8'; known: fp32, tf32, fp16, int8"):
        EngineOptions(precision="fp8")  # type: ignore[arg-type]


def test_more_threads_than_cores_are_refused_on_the_cpu_only() -> None:
    with pytest.raises(ValueError, match="4 streams × 1000 threads"):
        EngineOptions(backend="onnxruntime", streams=4, threads=1000)
    assert EngineOptions(backend="tensorrt", streams=4, threads=1000).threads_per_stream() == 1000


def test_a_model_has_its_own_options_or_the_defaults() -> None:
    own = ModelOptions(scheduling=PolicyName.parse("slackfit"), slo_ms=20.0)
    options = EngineOptions(models={"a": own})
    assert options.of("a") is own
    assert options.of("b") is options.defaults


def test_a_wait_that_uses_up_the_objective_is_refused() -> None:
    with pytest.raises(ValueError, match="well below it"):
        ModelOptions(max_queue_delay_ms=50.0, slo_ms=20.0)


@pytest.mark.parametrize("share", [0.0, 1.5, float("nan")])
def test_the_share_of_a_source_is_one(share: float) -> None:
    with pytest.raises(ValueError, match=r"max_source_share is .*, expected above 0 and at most 1"):
        ModelOptions(max_source_share=share)


def test_the_cheapest_without_forced_exits_is_a_contradiction() -> None:
    with pytest.raises(ValueError, match="cheapest forces exits"):
        ModelOptions(scheduling=PolicyName("cheapest"), forced_exits=False)


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
