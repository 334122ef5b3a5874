"""TensorRT and CUDA: what building engines (the compiler) and running them share.

::

    probe     is all there: driver, GPU, packages? No import of them, no CUDA context
    compat    TensorRT 8.6, 10 and 11: every difference, named; loading the packages
    device    a GPU's primary context, made current around work
    dtypes    TensorRT's data types as numpy's, and back
    trial     a finished engine run once, or timed
    lookup    which engines of a bundle run a stage here
    loading   an engine in device memory, and its contexts
    library   each loaded once, however many have it
    layout    what the engines of a stage have in scratch memory

Nothing here imports ``tensorrt`` or ``pycuda`` before it is needed, so that all of it imports on
a machine without a GPU. Ask :func:`offramp.engine.tensorrt.probe.require` first: without a driver
``tensorrt`` ends the whole process instead of raising.
"""
