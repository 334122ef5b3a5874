"""The options of an engine, and of each model that it serves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from offramp.bundle.engines import PRECISIONS, Precision
from offramp.bundle.schema.answers import TASK_KINDS
from offramp.engine.common.environment import available_cores
from offramp.engine.common.errors import BackendError, OptionsError
from offramp.engine.common.extensions import extensions_for
from offramp.engine.control.controller import ControllerKind
from offramp.engine.control.engine_builds import BuildBudget
from offramp.engine.models.devices import StreamDevices
from offramp.engine.models.learning_options import LearnOptions
from offramp.engine.scheduling.policies import PolicyName
from offramp.engine.stages.plan import Mode
from offramp.engine.tensorrt.probe import parse_devices

RUN_THROUGH = PolicyName("run-through")
MOST_SHARE = 1 - 1e-9
"""Largest confidence level or bound; for a larger value, (1 - value) divided among many exits would
be rounded to 0."""
_INF = float("inf")
_MOST_ROWS, MOST_THREADS, _MOST = 2**16, 2**12, 2**31 - 1
"""Largest number of rows in a batch, of threads in a process, and of everything else that options
count. A larger number is a typing error, and would exhaust the machine's memory at the start."""
SHARE_WEIGHTS = ("auto", "always", "never")
"""Choices of whether a bundle's models share one copy of their weights in memory."""
ON_CPU = ("onnxruntime", "openvino")
"""Backends whose streams use the machine's cores."""


def added_controllers() -> dict[str, ControllerKind]:
    """Return the controllers that extensions add, by name."""
    return {kind.name: kind for kinds in extensions_for("control") for kind in kinds}


def controller_names() -> tuple[str, ...]:
    """Return the names of the controllers for release and audit mode."""
    return "certified", *added_controllers(), "static"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """The options of one model: how it is scheduled, and how its policy is controlled."""

    scheduling: PolicyName = RUN_THROUGH
    """The scheduling policy (:data:`offramp.engine.scheduling.policies.POLICIES`)."""
    max_batch_size: int = 32
    """Largest number of rows in a batch; larger requests are split."""
    max_queue_delay_ms: float = 0.0
    """Longest time that a sample waits for a fuller batch while a stream is idle; for policies that
    form batches by size (run-through, refill, rebatch, delay)."""
    max_queue_samples: int = 4096
    """Largest number of waiting samples; more are refused."""
    padding: bool = True
    """True to pad samples of different length to share a batch, where the compiler found that no
    answer changes by more than rounding."""
    slo_ms: float | None = None
    """Service level objective: the deadline of requests without their own."""
    forced_exits: bool = True
    """True if a policy may force samples to leave at an exit below its threshold. Only policies
    that choose an exit for a batch do so: slackfit, max-batch and max-accuracy to meet deadlines,
    fixed and cheapest always. The promise does not hold for forced answers; their expected
    agreement is the value measured at calibration."""
    weight: float = 1.0
    """Weight of the model's share of the device, relative to other models' weights, while all are
    busy."""
    controller: str = "certified"
    """One of :func:`controller_names`: ``certified`` moves thresholds and exits as far as the
    evidence allows, ``apparate`` moves them as published in Apparate, ``static`` only measures."""
    max_disagreement: float | None = None
    """The constraint: largest tolerated share of answers that differ from the unmodified model's;
    ``None`` is the share for which the bundle was compiled."""
    confidence: float = 0.95
    """Confidence level of the certificate and of the upper bound of the disagreement."""
    audit_budget: float = 0.05
    """Largest share of all compute that audits may take (audit mode)."""
    ramp_budget: float | None = None
    """Largest delay of the model's end by the exits in use, as a share (Apparate's ramp budget).
    ``None`` is 0.02 in release mode, where exits save no compute, and under controllers that let
    every sample run on; else the cost of the compiled exits, at least 0.1."""

    trust_inputs: bool = False
    """True if exits answer samples whose inputs are far outside the calibration range, and the
    controller learns from them."""

    max_source_share: float = 1.0
    """Largest share of one source (a client's host) in the last 4,096 samples of the evidence; 1
    sets no limit."""

    never_beyond_compiled: bool = False
    """True if the controller's initial policy is the most aggressive one allowed: no exit gets a
    lower threshold, and no other exit answers."""

    learn: bool = True
    """True if the model learns exits, where the engine learns and the model is an ONNX file."""

    answer: str | None = None
    """Output to serve, for an ONNX file that has several outputs; a bundle has only one."""

    task: str | None = None
    """Kind of the answer of an ONNX file, one of :data:`.TASK_KINDS`; ``None`` derives it from the
    shape."""

    share_weights: str = "auto"
    """One of :data:`SHARE_WEIGHTS`: whether the model and its variants share one copy of their
    weights (:mod:`offramp.engine.models.weight_sharing`)."""

    def __post_init__(self) -> None:
        refuse_unless(self, lambda v: v >= 1, "at least 1", "max_batch_size", "max_queue_samples")
        refuse_unless(self, lambda v: v <= _MOST_ROWS, f"at most {_MOST_ROWS}", "max_batch_size")
        refuse_unless(self, lambda v: v <= _MOST, f"at most {_MOST}", "max_queue_samples")
        refuse_unless(self, lambda v: 0 <= v < _INF, "≥ 0", "max_queue_delay_ms", "ramp_budget")
        refuse_unless(self, lambda v: 0 < v < _INF, "above 0", "slo_ms", "weight")
        shares = ("max_disagreement", "confidence", "audit_budget")
        least = "above 0 and below 1"
        refuse_unless(self, lambda v: 0 < v <= MOST_SHARE, least, *shares)
        a_share = "above 0 and at most 1"
        refuse_unless(self, lambda v: 0 < v <= 1, a_share, "max_source_share")
        if self.slo_ms is not None and self.max_queue_delay_ms >= self.slo_ms:
            raise ValueError(
                f"max_queue_delay_ms is {self.max_queue_delay_ms}, but answers are due within "
                f"slo_ms {self.slo_ms}; expected well below it"
            )
        if self.scheduling.name == "cheapest" and not self.forced_exits:
            raise ValueError("policy cheapest forces exits, and forced_exits is false")
        if self.controller not in controller_names():
            known = ", ".join(controller_names())
            raise ValueError(f"there is no controller {self.controller!r}; known: {known}")
        if self.never_beyond_compiled and self.controller in added_controllers():
            raise ValueError(
                "never_beyond_compiled requires the compiled thresholds, and controller "
                f"{self.controller} tunes its own; choose certified or static"
            )
        if self.share_weights not in SHARE_WEIGHTS:
            known = ", ".join(SHARE_WEIGHTS)
            raise ValueError(
                f"share_weights is {self.share_weights!r:.60}, expected one of {known}"
            )
        if self.task is not None and self.task not in TASK_KINDS:
            raise ValueError(
                f"task is {self.task!r:.60}, expected one of {', '.join(TASK_KINDS)}; remove it if "
                "the answer's shape determines it"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The options of an engine: its device and mode, and those of each model."""

    mode: Mode = Mode.LEAVE
    backend: str = "auto"
    """One of :data:`offramp.engine.backends.BACKENDS`."""
    device: str = "cuda:0"
    """GPU for backends that use one; among several (``cuda:0,cuda:1``), streams alternate."""
    precision: Precision | None = None
    """Precision of TensorRT's engines; ``None`` is the lowest that was built."""
    graphs: bool = True
    """True if backends on GPUs capture stages into CUDA graphs."""
    engine_build_minutes: float = 0.0
    """Minutes per hour, in the long run, that may be spent on building engines while serving.
    Engines are built for stages that control started to use; with 0, such stages run as chains of
    segments."""
    streams: int = 1
    """Number of batches that run at the same time, over all models; 1 means one batch for each GPU
    of ``device``."""
    devices: StreamDevices | None = None
    """Devices that run the streams, one each; ``None`` runs them in this process."""
    threads: int | None = None
    """Intra-op threads of each stream; ``None`` divides the cores among the streams. Workers on
    other hosts set their own number."""
    parallel_below: int | None = None
    """PAME's τ_b: a new batch starts next to running batches only if each of these has fewer
    samples than this. With ``None`` a batch starts on any idle stream, unless ``max_violations``
    limits this."""
    max_violations: float | None = None
    """PAME's τ_l: tolerated share of samples that are late, which sets τ_b."""
    keep_state: bool = True
    """True to keep the state of controllers, and the batch profile, next to the bundle across
    restarts."""
    uncertified_exits: bool = False
    """True if exits answer even if the bundle was compiled on random inputs, which certify nothing;
    else its unmodified model is served."""
    learning: LearnOptions | None = None
    """Options for ONNX files that learn exits while they are served; ``None`` disables learning."""
    defaults: ModelOptions = field(default_factory=ModelOptions)
    extensions: Mapping[str, Any] = field(default_factory=dict)
    """Options of extensions, by the extension's name."""
    models: Mapping[str, ModelOptions] = field(default_factory=dict)
    """Complete options, by model name, where they differ from ``defaults``."""

    def __post_init__(self) -> None:
        counts = ("streams", "threads", "parallel_below")
        refuse_unless(self, lambda v: v >= 1, "at least 1", *counts)
        refuse_unless(self, lambda v: v <= _MOST, f"at most {_MOST}", "parallel_below")
        most = f"at most {MOST_THREADS}"
        refuse_unless(self, lambda v: v <= MOST_THREADS, most, "streams", "threads")
        if self.devices is not None:
            self.devices.check(self)
            object.__setattr__(self, "streams", self.devices.count)  # frozen from here on
        if self.max_violations is not None and self.parallel_below is not None:
            raise ValueError("expected parallel_below, or max_violations, which sets it, not both")
        refuse_unless(self, lambda v: 0 < v < 1, "a share: above 0, below 1", "max_violations")
        refuse_unless(self, lambda v: 0 <= v <= 60, "from 0 to 60", "engine_build_minutes")
        if self.precision is not None and self.precision not in PRECISIONS:
            raise ValueError(
                f"there is no precision {self.precision!r}; known: {', '.join(PRECISIONS)}"
            )
        self._spread_streams()
        if self.backend in ON_CPU:
            self.check_cores()

    def _spread_streams(self) -> None:
        """Use at least one stream per GPU; ValueError for devices that are not valid."""
        try:
            count = len(parse_devices(self.device))
        except BackendError as error:
            raise ValueError(f"device: {error}") from error
        if count == 1:
            return
        if self.devices is not None:
            raise ValueError(
                f"device is {self.device!r:.100}, but workers have their own GPUs: name them in "
                "the cluster file ([[workers]] device), and leave device out"
            )
        if self.backend in ON_CPU:
            raise ValueError(
                f"device is {self.device!r:.100}, but backend {self.backend} runs on the CPU; "
                "leave device out, or choose backend tensorrt or cuda"
            )
        if self.streams == 1:
            object.__setattr__(self, "streams", count)  # frozen from here on
        elif self.streams < count:
            raise ValueError(
                f"streams is {self.streams}, and device names {count} GPUs, expected at least one "
                f"stream for each; leave streams out, or set {count} or more"
            )

    def check_cores(self) -> None:
        """Raise OptionsError if stages run on the CPU with more threads than cores."""
        cores, streams = available_cores(), self._streams_here
        if streams * self.threads_per_stream() > cores:
            raise OptionsError(
                f"{streams} streams × {self.threads_per_stream()} threads are more than the "
                f"{cores} cores here: they would only wait for each other; set fewer"
            )

    def of(self, model: str) -> ModelOptions:
        """Return the options of a model by its name, or the defaults."""
        return self.models.get(model, self.defaults)

    @property
    def build_budget(self) -> BuildBudget | None:
        """Budget for building engines while serving; ``None`` builds none."""
        share = self.engine_build_minutes / 60
        return BuildBudget(share=share) if share else None

    def threads_per_stream(self) -> int:
        """Return the number of threads that was set, or an equal share of the cores."""
        return self.threads or max(1, available_cores() // max(1, self._streams_here))

    @property
    def _streams_here(self) -> int:
        """Number of streams that run on this host's cores."""
        return self.streams if self.devices is None else self.devices.local


def refuse_unless(
    options: object, allowed: Callable[[float], bool], expected: str, *names: str
) -> None:
    """Raise ValueError if a named field has a forbidden value; ``None`` is allowed."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not allowed(value):
            raise ValueError(f"{name} is {value!s:.60}, expected {expected}")
