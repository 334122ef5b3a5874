"""CUDA kernels that run between stages: exit checks, compaction of survivors, row gathers.

Sources (``*.cu``, ``*.cuh``), their compilation, and what the host hands to them. No module here
names TensorRT or PyCUDA.
"""
