"""Checks of a backend on the machine that will serve, which no fake device can replace.

::

    run          the whole check: makes the backend, runs all checks in about a minute, closes it
    stages       answers, tensors for later stages, confidences and exits of stages
    rows         results of selecting, buffering and merging
    slots        parallel slots, CUDA graphs, slots after failures
    kernels      our kernels against numpy
    resources    memory, descriptors, threads; closing
    subject      a bundle on the backend: its stages, inputs for them, and references
    bench        device memory and a stream of a check
    results      results of checks, the environment, and the report

Results are compared with references. For stages, the reference is the bundle's segments, which run
one after the other in plain ONNX Runtime on the CPU. For kernels, it is numpy. For operations that
only move rows, it is the backend's own tensors, bit for bit.
"""

from offramp.engine.self_check.check_results import CheckVerdict, SelfCheckReport
from offramp.engine.self_check.run import run_self_check

__all__ = ["CheckVerdict", "SelfCheckReport", "run_self_check"]
