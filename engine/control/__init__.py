"""Control while serving: controllers that watch a model's answers and change its exit policy.

Sans I/O; it may import :mod:`offramp.certify`, bundles and the latencies of scheduling. Start with
:mod:`.controller` (what a controller is) and :mod:`.certified` (ours); ``published/`` holds those
of others, for comparison.
"""
