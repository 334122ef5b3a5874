"""Planning (E3): which devices run which segments, at which batch size, as exits are forecast.

May import: bundle, engine.scheduling.

Sans I/O, and nothing serves by it yet: :mod:`.optimiser` is the place to start, :mod:`.cluster`
says what there is to plan with, :mod:`.cluster_plan` what a plan is.
"""
