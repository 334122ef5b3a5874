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
"""Largest confidence level or bound; nearer to 1, what is left of it for each of many exits rounds
to nothing."""
_INF = float("inf")
_MOST_ROWS, MOST_THREADS, _MOST = 2**16, 2**12, 2**31 - 1
"""Of a batch, of a process, and of what is only counted: more is a slip of the hand, and would
exhaust the machine before anything is served."""
SHARE_WEIGHTS = ("auto", "always", "never")
"""What may be asked of weights in memory: that a bundle's models have one copy of them."""
ON_CPU = ("onnxruntime", "openvino")
"""The backends whose streams are the machine's cores."""


def added_controllers() -> dict[str, ControllerKind]:
    """Return the controllers that extensions add, by name."""
    return {kind.name: kind for kinds in extensions_for("control") for kind in kinds}


def controller_names() -> tuple[str, ...]:
    """Return the controllers that a model may have in release and audit mode."""
    return "certified", *added_controllers(), "static"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """The options of one model: how it is scheduled, and how its policy is controlled."""

    scheduling: PolicyName = RUN_THROUGH
    """The scheduling policy (:data:`offramp.engine.scheduling.policies.POLICIES`)."""
    max_batch_size: int = 32
    """Most rows of a batch; larger requests are split."""
    max_queue_delay_ms: float = 0.0
    """Longest time that a sample waits for batch mates while a stream idles; of the policies
    that form batches by size (run-through, refill, rebatch, delay)."""
    max_queue_samples: int = 4096
    """Most samples that wait; more are refused."""
    padding: bool = True
    """Whether samples of different length are padded to share a batch, where the compiler found
    that no answer changes by more than rounding."""
    slo_ms: float | None = None
    """Service level objective: the deadline of requests that bring none."""
    forced_exits: bool = True
    """Whether a policy may make samples leave at an exit below its threshold. Only those do that
    choose a depth: slackfit, max-batch and max-accuracy to be in time, fixed and cheapest
    always. Agreement is then what was measured at calibration for such an exit, and the promise
    does not hold."""
    weight: float = 1.0
    """Share of the device relative to the other models', while all are busy."""
    controller: str = "certified"
    """One of :func:`controller_names`: ``certified`` moves thresholds and exits as far as evidence
    carries, ``apparate`` as Apparate publishes it, ``static`` only measures."""
    max_disagreement: float | None = None
    """The constraint: largest tolerated share of answers unlike the unmodified model's;
    ``None`` is what the bundle was compiled for."""
    confidence: float = 0.95
    """With which certificate and upper bound hold."""
    audit_budget: float = 0.05
    """Largest share of all compute that audits may take (audit mode)."""
    ramp_budget: float | None = None
    """How much later the model's end may come for the exits in use, as a share (Apparate's ramp
    budget); ``None`` is 0.02 in release mode, where exits save no compute, and under controllers
    that let every sample run on, else what the exits compiled in cost, at least 0.1."""

    trust_inputs: bool = False
    """Whether exits answer, and the controller learns from, samples whose inputs are far outside of
    what calibration saw."""

    max_source_share: float = 1.0
    """Largest share that one source, a client's host, has of the last 4,096 samples of the
    evidence; 1 bounds nothing."""

    never_beyond_compiled: bool = False
    """Whether the policy that the controller starts with is the most aggressive one ever: no exit
    gets a lower threshold, and no other exit answers."""

    learn: bool = True
    """Whether exits are learned for the model, where the engine learns and it is an ONNX file."""

    answer: str | None = None
    """Output to serve of an ONNX file that has several; bundles have one already."""

    task: str | None = None
    """Kind of the answer of an ONNX file, one of :data:`.TASK_KINDS`; ``None`` is by its shape."""

    share_weights: str = "auto"
    """One of :data:`SHARE_WEIGHTS`: whether the model and its variants run on one copy of their
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
                "never_beyond_compiled keeps to thresholds that were compiled, and controller "
                f"{self.controller} tunes its own; choose certified or static"
            )
        if self.share_weights not in SHARE_WEIGHTS:
            known = ", ".join(SHARE_WEIGHTS)
            raise ValueError(
                f"share_weights is {self.share_weights!r:.60}, expected one of {known}"
            )
        if self.task is not None and self.task not in TASK_KINDS:
            raise ValueError(
                f"task is {self.task!r:.60}, expected one of {', '.join(TASK_KINDS)}; leave it out "
                "where the answer's shape tells"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The options of an engine: its device and mode, and those of each model."""

    mode: Mode = Mode.LEAVE
    backend: str = "auto"
    """One of :data:`offramp.engine.backends.BACKENDS`."""
    device: str = "cuda:0"
    """The GPU, for backends that use one; to several (``cuda:0,cuda:1``) streams are dealt out in
    turn."""
    precision: Precision | None = None
    """The precision of TensorRT's engines; ``None`` is the least of those that were built."""
    graphs: bool = True
    """Whether such backends capture stages into CUDA graphs."""
    engine_build_minutes: float = 0.0
    """Minutes of an hour, in the long run, in which engines are built beside serving for stages
    that control brought into use; 0 builds none, and such stages run as chains of segments."""
    streams: int = 1
    """Batches that run at the same time, of whatever models; 1 is one for each GPU of
    ``device``."""
    devices: StreamDevices | None = None
    """What runs the streams, one each; ``None`` runs them in this process."""
    threads: int | None = None
    """Intra-op threads of each stream; ``None`` shares the cores among the streams. Workers on
    other hosts say themselves how many they use."""
    parallel_below: int | None = None
    """PAME's τ_b: a new batch starts beside running ones once each has fewer samples than this;
    ``None`` starts one on any idle stream, unless ``max_violations`` says more."""
    max_violations: float | None = None
    """PAME's τ_l: τ_b follows from this share of late samples."""
    keep_state: bool = True
    """Whether what a controller learned, and the batch profile, are kept beside the bundle, over
    restarts."""
    uncertified_exits: bool = False
    """Whether exits answer of a bundle that was compiled on random inputs, which certify nothing;
    else its unmodified model is served."""
    learning: LearnOptions | None = None
    """How models that are ONNX files get exits while they are served; ``None`` learns nothing."""
    defaults: ModelOptions = field(default_factory=ModelOptions)
    extensions: Mapping[str, Any] = field(default_factory=dict)
    """By the name of an extension, its own options of engines."""
    models: Mapping[str, ModelOptions] = field(default_factory=dict)
    """By name, of models that differ from ``defaults``, whole."""

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
            raise ValueError("give parallel_below, or max_violations that it follows, not both")
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
        """Have a stream for each GPU at least; refuse, by a ValueError, devices that are none."""
        try:
            count = len(parse_devices(self.device))
        except BackendError as error:
            raise ValueError(f"device: {error}") from error
        if count == 1:
            return
        if self.devices is not None:
            raise ValueError(
                f"device is {self.device!r:.100}, and workers have GPUs of their own: name them in "
                "the cluster file ([[workers]] device), and leave device out"
            )
        if self.backend in ON_CPU:
            raise ValueError(
                f"device is {self.device!r:.100}, and backend {self.backend} runs on the CPU; "
                "leave device out, or choose backend tensorrt or cuda"
            )
        if self.streams == 1:
            object.__setattr__(self, "streams", count)  # frozen from here on
        elif self.streams < count:
            raise ValueError(
                f"streams is {self.streams}, and device names {count} GPUs, expected a stream for "
                f"each at least; leave streams out, or give {count} or more"
            )

    def check_cores(self) -> None:
        """Refuse, by an OptionsError, more threads than cores where the CPU executes."""
        cores, streams = available_cores(), self._streams_here
        if streams * self.threads_per_stream() > cores:
            raise OptionsError(
                f"{streams} streams × {self.threads_per_stream()} threads are more than the "
                f"{cores} cores here: they would only wait for each other; give fewer"
            )

    def of(self, model: str) -> ModelOptions:
        """Give the options of a model."""
        return self.models.get(model, self.defaults)

    @property
    def build_budget(self) -> BuildBudget | None:
        """Of building engines beside serving; ``None`` builds none."""
        share = self.engine_build_minutes / 60
        return BuildBudget(share=share) if share else None

    def threads_per_stream(self) -> int:
        """Give the threads asked for, or an equal share of the cores (at least one)."""
        return self.threads or max(1, available_cores() // max(1, self._streams_here))

    @property
    def _streams_here(self) -> int:
        """Those that run on this host's cores."""
        return self.streams if self.devices is None else self.devices.local


def refuse_unless(
    options: object, allowed: Callable[[float], bool], expected: str, *names: str
) -> None:
    """Refuse, by a ValueError, fields of options whose value is not allowed; ``None`` always is."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not allowed(value):
            raise ValueError(f"{name} is {value!s:.60}, expected {expected}")
