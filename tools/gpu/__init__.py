"""For a GPU machine without network: what it needs, the tests there, and measurements there.

::

    collect.sh      where registries are reachable: wheels (and TensorRT) into parts to carry over
    setup.sh        there: an environment out of the parts, then a table of what is there
    run_tests.sh    there: tests/gpu, then the kernels under compute-sanitizer
    benchmark.sh    there: kernels, engines and the runtime measured, written as JSON
    pycuda.sh       builds PyCUDA without a driver; for the first two
    parts, pack     files split into parts of a size, and joined; TensorRT made smaller
    environment     what is there: driver, GPU, packages, compiler
    device          our kernels launched through PyCUDA; for tests/gpu, too
    stage_ends      measures stage ends and compaction
    engines         builds, checks and measures engines
    graphs          graphs with random weights; of them:
      resnets       ResNet-50 and ResNet-101, as one graph and as stages
      berts         BERT
    staged          bundles without training, whose exits' confidences may be replayed
    models          what the runtime is measured on, and which samples leave where
    machine         backends of the GPU, plain or with times taken by
      timing        a driver and a factory that take times
    pame            stages against the source model (PAME, figures 9 and 17)
    serving         the whole engine: parallel batches (figure 18), a long run
    runtime         these as parts of
      benchmark     the command line of all measurements
    wheels-*.txt    what is collected for Python 3.10 (TensorRT 8.6) and 3.12
    python310/      what our code needs of Python 3.11, where TensorRT 8.6 holds it at 3.10

With half an hour of a machine that forgets everything, and ten minutes a command (each ends in
time, and goes on where the last one was)::

    setup.sh PARTS                                                              2 min
    run_tests.sh --only kernels --only runtime --limit 150                      8 min
    benchmark.sh --only models --models bert-base,resnet101                     5 min
    benchmark.sh --only pame --only parallel --models bert-base,resnet101       6 min
    benchmark.sh --only soak --models bert-base                                 6 min

and, with what is left, or another time::

    run_tests.sh --only engines --only memcheck --only racecheck --only synccheck
    benchmark.sh --only models --only pame --models resnet50     exit check's share at batch 32
    benchmark.sh --only models --only pame --backend cuda        without TensorRT

The minutes are estimates: none of the runtime's parts has been run on a GPU yet.
"""
