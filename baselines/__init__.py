"""Extension: controllers and threshold searches that others published, for comparison with ours.

The controllers of Apparate and PAME may serve (``eeserve --controller apparate``, ``pame``); the
threshold searches are driven by ``python -m benchmarks.adapt`` and the benchmarks.
"""
