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

On an H100 in November 2026: engines of ResNet-101 for two profiles took 2.5 minutes, of BERT-base
for four 6 minutes, of the example for two 1.6 minutes (one core busy, the GPU idle: several
processes at once cost nothing); the kernels' tests 14 s, under memcheck, synccheck and racecheck
19, 19 and 102 s; a self-check of two bundles 35 s.

On an H200 in November 2026: bundles of ResNet-101 and BERT-base were made in 13 and 21 s; all 14
engines of both for two profiles, in fp32 and fp16, in 171 s, each in a process of its own, with the
GPU busy. ``--only pame --rounds 5 --go-on 0.3`` took 30 s of a model with TensorRT's engines, 50 s
for BERT-base, and 70 s with ONNX Runtime's provider; four values of τ_b at 400 requests 50 s of
ResNet-101, and more than 70 s of BERT-base. TensorRT 8.6 checks the hash of its builder resource at
its start: that file must be carried whole. In libnvinfer and ONNX Runtime's provider, machine code
for other GPUs can be overwritten with zeros: the provider then travels in 73 MB instead of 256.
"""
