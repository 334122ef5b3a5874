"""Planning (E3): assigns segments to devices and chooses a batch size, for forecast exit shares.

Sans I/O. Start with :mod:`.optimiser`; :mod:`.cluster` describes models and devices, and
:mod:`.cluster_plan` describes plans. ``eecompile plan`` prints plans; ``eeserve --cluster`` serves
by them (:mod:`.serving.cluster_serving`, :mod:`offramp.cluster.serving.plan_loop`).
"""
