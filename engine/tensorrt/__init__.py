"""TensorRT: what building engines (in the compiler) and running them share.

::

    probe           is all there: driver, GPU, packages? No import of them, no CUDA context
    compat          TensorRT 8.6, 10 and 11: every difference, named; loading the packages
    device          a GPU's primary context, made current around work
    messages        TensorRT's messages to logging, its errors into ours
    lookup          which engines of a bundle run a stage here
    loading         engines in device memory, each loaded once, and their contexts
    scratch_layout  what the engines of a stage keep in scratch memory
    standalone      a finished engine run by itself: to verify it, or to time it

Nothing here imports ``tensorrt`` or ``pycuda`` before it is needed, so that all of it imports on
a machine without a GPU. Ask :func:`offramp.engine.tensorrt.probe.require` first: without a driver
``tensorrt`` ends the whole process instead of raising.
"""
