"""CUDA kernels that run between stages: exit checks, compaction of survivors, row gathers.

They consist of sources (``*.cu``, ``*.cuh``), their compilation, and their arguments. No module
here names TensorRT or PyCUDA.
"""
