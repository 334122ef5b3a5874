"""Code for TensorRT, shared by the compiler (builds engines) and the server (runs engines).

::

    probe           checks driver, GPU and packages, without importing them or a CUDA context
    compat          all differences of TensorRT 8.6, 10 and 11; loading the packages
    tensorrt_messages  TensorRT's messages to logging, its errors to ours
    lookup          the engines of a bundle that run a stage here
    loading         engines in device memory, each loaded once, and their contexts
    scratch_layout  scratch memory of the engines of a stage
    standalone      a finished engine run alone: to verify it, or to time it

No module here imports ``tensorrt`` or ``pycuda`` before it is needed, so that all can be imported
on a machine without a GPU. Call :func:`offramp.engine.tensorrt.probe.require` first: without a
driver, ``tensorrt`` ends the whole process instead of raising an error.
"""
