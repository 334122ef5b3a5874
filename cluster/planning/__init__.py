"""Planning (E3): which devices run which segments, at which batch size, as exits are forecast.

Sans I/O: :mod:`.optimiser` is the place to start, :mod:`.cluster` describes what there is to plan
with, :mod:`.cluster_plan` what a plan is. ``eecompile plan`` prints plans; ``eeserve --cluster``
serves by them (:mod:`.serving.cluster_serving`, :mod:`offramp.cluster.serving.plan_loop`).
"""
