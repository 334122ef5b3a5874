"""The parts that backends on a GPU share: slots, buffers and graphs over a small driver protocol.

::

    backend        prepared stages and slots
    slot           one stream: upload, run, select, buffer, merge
    stages         which stages there are, and who still needs them
    runs           the stages open in a slot, and what is known before one runs
    execution      how one runs: its shapes, its CUDA graph, and what a batch adds to that
    padding        the few batch sizes that stages are run at
    stream         kernels and copies of rows, enqueued and waited for
    memory, batch  buffers and the pool; what lies in them, where and for how long
    executable     what runs a stage: protocols that TensorRT and ONNX Runtime fill
    driver         what is asked of CUDA: a protocol; pycuda_driver and graphs fill it on a GPU

Nothing here names TensorRT or ONNX Runtime. :mod:`offramp.testing.cuda_driver` is a driver on the
host, which checks that nothing is read before it was written and nothing is freed that is in use.
"""
