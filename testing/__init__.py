"""Fakes of every outside party: backend, engine, CUDA driver and kernels, TensorRT builder."""
