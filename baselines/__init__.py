"""Extension: published controllers and threshold searches of others, for comparison with ours.

The controllers of Apparate and PAME can serve (``eeserve --controller apparate``, ``pame``);
``python -m benchmarks.adapt`` and other benchmarks run the threshold searches.
"""
