"""Control while serving: controllers that watch a model's answers and change its exit policy.

Sans I/O; imports only :mod:`offramp.certify`, bundles and the latencies of scheduling. Start with
:mod:`.controller` (the interface of a controller) and :mod:`.certified` (our controller). Published
controllers of others are in the extension ``baselines/``, for comparison.
"""
