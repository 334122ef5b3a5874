"""Extension: controllers and threshold searches that others published, for comparison with ours.

Apparate's controller may serve (``eeserve --controller apparate``); the others are driven by
``python -m benchmarks.adapt`` and the benchmarks.
"""
