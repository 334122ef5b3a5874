"""Planning (E3): which devices run which segments, at which batch size, as exits are forecast.

May import: bundle, engine.scheduling.

Sans I/O: :mod:`.optimiser` is the place to start, :mod:`.cluster` describes what there is to plan
with, :mod:`.cluster_plan` what a plan is. ``eecompile plan`` prints plans; ``eeserve --cluster``
serves by them (:mod:`offramp.engine.cluster_serving`, :mod:`offramp.engine.plan_loop`).
"""
