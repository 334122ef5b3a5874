"""Scripts for a GPU machine without network: environment, tests and measurements there.

::

    collect.sh      where registries are reachable: wheels (and TensorRT) into parts to transfer
    setup.sh        there: an environment from the parts, then a table of its versions
    run_tests.sh    there: tests/gpu, including the kernels under compute-sanitizer
    benchmark.sh    there: kernels, engines and the runtime measured, written as JSON
    everything.sh   there: tests and measurements, the most important first
    pycuda.sh       builds PyCUDA without a driver; for the first two
    parts, pack     files split into parts of one size, and joined; TensorRT made smaller
    environment     table of driver, GPU, packages, compiler
    device          our kernels launched through PyCUDA; also for tests/gpu
    stage_ends      measures stage ends and compaction
    engines         builds, checks and measures engines
    graphs          graphs with random weights:
      resnets       ResNet-50 and ResNet-101, as one graph and as stages
      berts         BERT
    staged          bundles without training, whose exits' confidences may be replayed
    models          models and exit patterns for measurements of the runtime
    machine         backends of the GPU, plain or timed by
      timing        a driver and a factory that take times
    pame            stages against the source model (PAME, figures 9 and 17)
    serving         the whole engine: parallel batches (figure 18), a long run
    runtime         these measurements as parts of
      benchmark     the command line of all measurements
    wheels-*.txt    packages for Python 3.10 (TensorRT 8.6) and 3.12
    python310/      parts of Python 3.11 that our code needs, where TensorRT 8.6 requires 3.10

For a machine that is available for half an hour and then loses its files: make the parts before,
and rehearse ``setup.sh`` and the tests with the transferred Python. Then, on the machine::

    setup.sh PARTS            15 s, once all parts of 57 MB are there (5 s each)
    everything.sh             in a session of its own, checked from time to time

On an H100 in November 2026, engines of ResNet-101 for two profiles took 2.5 minutes, engines of
BERT-base for four profiles 6 minutes, and engines of the example for two profiles 1.6 minutes. One
core was busy and the GPU idle, so several processes could build at once without loss. The kernels'
tests took 14 s; under memcheck, synccheck and racecheck they took 19, 19 and 102 s. A self-check of
two bundles took 35 s.

On an H200 in November 2026, making the bundles of ResNet-101 and BERT-base took 13 and 21 s. All 14
engines of both models for two profiles, in fp32 and fp16, took 171 s, each in its own process, with
the GPU busy. ``--only pame --rounds 5 --go-on 0.3`` took 30 s for a model with TensorRT's engines,
50 s for BERT-base, and 70 s with ONNX Runtime's provider. Four values of τ_b at 400 requests took
50 s for ResNet-101, and more than 70 s for BERT-base. TensorRT 8.6 checks the hash of its builder
resource when it starts, so this file must be transferred unchanged. In libnvinfer and ONNX
Runtime's provider, machine code for other GPUs can be overwritten with zeros: compressed, the
provider then has 73 MB instead of 256.
"""
