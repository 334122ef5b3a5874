"""Parts that backends on a GPU share: slots, buffers and graphs over a small driver protocol.

::

    backend        prepared stages and slots
    slot           one stream: upload, run, select, buffer, merge
    stages         registry of stages and their users
    runs           the stages open in a slot, and facts known before one runs
    execution      a stage's run: shapes, CUDA graph, and the parts of each batch
    padding        the few batch sizes that stages are run at
    stream         kernels and copies of rows, enqueued and waited for
    memory, batch  buffers and the pool; the tensors in them, their offsets and lifetimes
    executable     protocols of running stages, which TensorRT and ONNX Runtime implement
    driver         the protocol of CUDA; pycuda_driver and graphs implement it on a GPU

No module here names TensorRT or ONNX Runtime. :mod:`offramp.testing.cuda_driver` is a driver on the
host, which checks that memory is not read before it is written, or freed while in use.
"""
