"""What backends on a GPU share: slots, buffers and kernels over a small driver interface.

Nothing here names TensorRT or ONNX Runtime. :mod:`driver` says what is asked of CUDA,
:mod:`pycuda_driver` does it on a GPU, :mod:`offramp.testing.cuda_driver` on the host, where it
checks that nothing is read before it was written and nothing is freed that is still in use.
"""
