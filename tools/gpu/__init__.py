"""For a GPU machine without network: what it needs, the tests there, and measurements there.

::

    collect.sh      where registries are reachable: wheels (and TensorRT) into parts to carry over
    setup.sh        there: an environment out of the parts, then a table of what is there
    run_tests.sh    there: tests/gpu, then the kernels under compute-sanitizer
    benchmark.sh    there: kernels and engines measured, written as JSON
    pycuda.sh       builds PyCUDA without a driver; for the first two
    parts, pack     files split into parts of a size, and joined; TensorRT made smaller
    environment     what is there: driver, GPU, packages, compiler
    device          our kernels launched through PyCUDA; for tests/gpu, too
    resnet50        ResNet-50 with random weights, as one graph and as stages
    stage_ends      measures stage ends and compaction
    engines         builds, checks and measures engines
    benchmark       the command line of these two
    wheels-*.txt    what is collected for Python 3.10 (TensorRT 8.6) and 3.12
    python310/      what our code needs of Python 3.11, where TensorRT 8.6 holds it at 3.10
"""
