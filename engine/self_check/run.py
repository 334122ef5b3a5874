"""The self-check: makes a backend, checks everything in about a minute, and closes it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from offramp.bundle import Bundle
from offramp.bundle.engines import list_targets
from offramp.engine.backends import Backend
from offramp.engine.common.errors import BackendError
from offramp.engine.models.options import EngineOptions
from offramp.engine.models.plain_serving import options_for
from offramp.engine.self_check import kernels, resource_checks, row_checks, slots, stage_checks
from offramp.engine.self_check.bench import bench_of
from offramp.engine.self_check.check_results import (
    Check,
    CheckFailedError,
    CheckResult,
    CheckSkippedError,
    CheckVerdict,
    Facts,
    SelfCheckReport,
    TimeLimit,
    describe_environment,
)
from offramp.engine.self_check.subject import CheckSubject
from offramp.engine.serving.opening import backend_for
from offramp.engine.stages.plan import make_plan
from offramp.engine.tensorrt.lookup import PREFERRED, TOLERANCES
from offramp.engine.tensorrt.probe import parse_devices

SECONDS: Final = 45.0
"""Seconds for all checks, not counting the loading of stages and the reference's answers."""
HANG_TIMEOUT_S: Final = 120.0
"""Additional seconds after which a check counts as hanging, beyond its share of :data:`SECONDS`. A
check always warms up and runs its first case."""
_LOADING: Final = 10
"""Multiple of :data:`SECONDS` after which loading one bundle counts as hanging."""
_CPU_TOLERANCE: Final = 1e-4
"""Tolerance of stages on the CPU: in one graph, sums are computed in another order."""

_LOG = logging.getLogger(__name__)

BackendMaker = Callable[[Mapping[str, Path], EngineOptions], Backend]
PrintLine = Callable[[str], None]


def run_self_check(
    models: Mapping[str, Path],
    options: EngineOptions,
    *,
    make: BackendMaker = backend_for,
    print_line: PrintLine = lambda _: None,
    seconds: float = SECONDS,
    hang_timeout_s: float = HANG_TIMEOUT_S,
) -> SelfCheckReport:
    """Check the backend of the options, with the stages of bundles, and close it.

    Args:
        models: Bundles by name, as they would be served.
        options: Options as for serving.
        make: Makes the backend.
        print_line: Called with each line of progress.
        seconds: Seconds for all checks together.
        hang_timeout_s: Additional seconds after which a check counts as hanging; the remaining
            checks are then skipped.

    Raises:
        BundleError: A bundle is absent, damaged or of another version.
        BackendError: The backend cannot run here.
    """
    if len(parse_devices(options.device)) > 1:
        raise BackendError(
            f"device is {options.device}, but a self-check uses one GPU; run it once for each"
        )
    bundles = {name: Bundle.open(path) for name, path in models.items()}
    backend = make(models, options)
    environment = describe_environment(
        backend,
        options.device,
        mode=options.mode.value,
        graphs=options.graphs,
        precision=options.precision,
        models={name: str(bundle.path) for name, bundle in bundles.items()},
    )
    device = environment["device"]
    print_line(f"checking {backend.name} on {device['name'] if device else environment['cpu']}")
    runner = _Runner(print_line, hang_timeout_s)
    subjects: list[CheckSubject] = []
    for name, bundle in bundles.items():
        load = partial(_load, subjects, name, bundle, backend, options)
        check = Check(name="load", asserts=_LOAD, run=load, bundle=name)
        runner.run(check, _LOADING * seconds)
    checks = [*_of_device(backend), *_of_models(subjects)]
    close = partial(resource_checks.check_close, backend, subjects)
    checks.append(Check(name="close", asserts=_CLOSE, run=close))
    shares = sum(check.share for check in checks)
    for check in checks:
        runner.run(check, seconds * check.share / shares)
    report = SelfCheckReport(
        environment=environment, results=tuple(runner.results), hangs=runner.hanging is not None
    )
    print_line(report.summary())
    return report


_LOAD = "every stage is loaded, and the reference answers the samples"
_CLOSE = "slots and backend release all resources"


def _of_device(backend: Backend) -> Iterator[Check]:
    """Yield the checks of our kernels."""
    for name, asserts, function in (
        (
            "exit-check-kernel",
            "the kernel computes numpy's confidences and survivors",
            kernels.check_exit_check_kernel,
        ),
        (
            "compaction-kernel",
            "the kernels compact exactly the surviving rows, in order",
            kernels.check_compaction_kernel,
        ),
    ):

        def run(limit: TimeLimit, function: _OnBench = function) -> Facts:
            bench = bench_of(backend)
            if bench is None:
                raise CheckSkippedError("this backend does not use Offramp's kernels")
            return function(bench, limit)

        yield Check(name=name, asserts=asserts, run=run)


_OnBench = Callable[..., Facts]
_OF_MODELS: Final[tuple[tuple[str, str, float, _OnBench], ...]] = (
    (
        "answers",
        "answers and confidences of stages equal those of the segments in plain ONNX Runtime",
        3.0,
        stage_checks.check_answers,
    ),
    ("carry", "stages carry the same tensors as the segments", 1.5, stage_checks.check_carry),
    (
        "confidence",
        "confidences are those of the answers, 0 for NaN",
        1.0,
        stage_checks.check_confidence,
    ),
    (
        "thresholds",
        "rows leave exactly from their confidence on",
        1.0,
        stage_checks.check_thresholds,
    ),
    ("batch-mates", "answers do not depend on batch mates", 1.0, stage_checks.check_batch_mates),
    ("select", "continuing rows keep content and order", 1.0, row_checks.check_select),
    ("merge", "buffered rows are merged whole and in order", 1.0, row_checks.check_merge),
    ("graphs", "CUDA graphs read the inputs at their launch", 1.0, slots.check_graphs),
    ("slots", "two parallel slots answer as one after the other", 1.0, slots.check_slots),
    ("restart", "slots answer after a failure, and after a restart", 1.0, slots.check_restart),
    ("memory", "no resource grows with the number of batches", 2.0, resource_checks.check_memory),
)
"""Name, claim, share of the time, and function of each check."""


def _of_models(subjects: Sequence[CheckSubject]) -> Iterator[Check]:
    for subject in subjects:
        for name, asserts, share, function in _OF_MODELS:
            yield Check(
                name=name,
                asserts=asserts,
                run=partial(function, subject),
                bundle=subject.name,
                share=share,
            )


def _load(
    subjects: list[CheckSubject],
    name: str,
    bundle: Bundle,
    backend: Backend,
    options: EngineOptions,
    _: TimeLimit,
) -> Facts:
    """Prepare the stages that would be served, and add the bundle to ``subjects``."""
    options = options_for(name, bundle.manifest, options)
    bundle = backend.as_computed(bundle)
    plan = make_plan(bundle, bundle.policy, options.mode)
    subject = CheckSubject(
        name=name,
        bundle=bundle,
        backend=backend,
        plan=plan,
        stages=tuple(backend.prepare(spec) for spec in plan.stages),
        max_rows=options.of(name).max_batch_size,
        tolerance=tolerance_of(bundle, backend, options),
        threads=options.threads_per_stream(),
    )
    began_s = time.monotonic()
    samples = subject.sample_count
    answered = sum(stage.answer is not None for stage in subject.truth)
    subjects.append(subject)
    return {
        "stages": len(plan.stages),
        "exits": list(plan.exits),
        "samples": samples,
        "stages_that_answer": answered,
        "reference_seconds": round(time.monotonic() - began_s, 2),
    }


def tolerance_of(bundle: Bundle, backend: Backend, options: EngineOptions) -> float:
    """Return the tolerance of a stage against the segments in float32, relative to its scale.

    The tolerance is at least that of the compiler's check of the cut model. In half precision and
    below it includes the rounding of the engine and the rounding of its graph; each is as large as
    a build allows.
    """
    verified = bundle.manifest.verified_tolerance
    if backend.on_cpu:
        return max(verified, _CPU_TOLERANCE)
    built = {target.precision for target in list_targets(bundle.path)}
    preferred = options.precision or next((p for p in PREFERRED if p in built), None)
    precision = preferred if backend.name == "tensorrt" and preferred else "fp32"
    twice = 2 if precision in ("fp16", "int8") else 1
    return max(verified, twice * TOLERANCES[precision])


class _Runner:
    """Runs checks one after the other, each on a thread that can be abandoned."""

    def __init__(self, print_line: PrintLine, hang_timeout_s: float) -> None:
        self.results: list[CheckResult] = []
        self.hanging: str | None = None
        """Name of the check that hangs; ``None`` if none does."""
        self._print_line = print_line
        self._hangs_after_s = hang_timeout_s

    def run(self, check: Check, seconds: float) -> None:
        """Run a check, and report its result."""
        began_s = time.monotonic()
        if self.hanging is not None:
            verdict, reason, facts = _skipped(f"{self.hanging} does not end")
        else:
            verdict, reason, facts = self._outcome(check, seconds)
        result = CheckResult(
            name=check.name,
            asserts=check.asserts,
            bundle=check.bundle,
            verdict=verdict,
            reason=reason,
            facts=facts,
            seconds=round(time.monotonic() - began_s, 2),
        )
        self.results.append(result)
        self._print_line(result.line())

    def _outcome(self, check: Check, seconds: float) -> _Outcome:
        found: list[_Outcome] = []
        thread = threading.Thread(
            target=lambda: found.append(_outcome(check, TimeLimit(seconds))),
            name=f"self-check-{check.name}",
            daemon=True,  # a kernel that never ends must not keep the process
        )
        thread.start()
        thread.join(seconds + self._hangs_after_s)
        if found:
            return found[0]
        self.hanging = check.name
        reason = (
            f"it did not end within {seconds + self._hangs_after_s:.0f} s; check the device "
            "(nvidia-smi), and send us the report"
        )
        return CheckVerdict.FAILED, reason, {}


_Outcome = tuple[CheckVerdict, str, Facts]


def _outcome(check: Check, limit: TimeLimit) -> _Outcome:
    try:
        return CheckVerdict.PASSED, "", check.run(limit)
    except CheckSkippedError as error:
        return _skipped(str(error))
    except CheckFailedError as error:
        return CheckVerdict.FAILED, str(error), error.facts
    except BackendError as error:
        return CheckVerdict.FAILED, str(error), {}
    except Exception as error:  # any error must be in the user's report
        _LOG.exception("%s failed", check.name)
        return CheckVerdict.FAILED, f"{type(error).__name__}: {error}", {}


def _skipped(reason: str) -> _Outcome:
    return CheckVerdict.SKIPPED, reason, {}
