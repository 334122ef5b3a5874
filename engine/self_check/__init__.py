"""Checks of a backend on the machine that will serve: what no fake of a device can know.

::

    run          the whole check: makes the backend, runs all in about a minute, closes it
    stages       what stages answer and hand on, how sure they are, who leaves
    rows         what selecting, buffering and merging keep
    slots        side by side, as CUDA graphs, after failures
    kernels      our kernels against numpy
    resources    memory, descriptors, threads; closing
    subject      a bundle on the backend: its stages, inputs for them, and the truth
    bench        device memory and a stream of a check's own
    results      what each check found, the environment, and the report

The truth is a bundle's segments one after the other in plain ONNX Runtime on the CPU, numpy for the
kernels, and, for whatever only moves rows about, the backend's own tensors, bit for bit.
"""

from offramp.engine.self_check.check_results import CheckVerdict, SelfCheckReport
from offramp.engine.self_check.run import run_self_check

__all__ = ["CheckVerdict", "SelfCheckReport", "run_self_check"]
