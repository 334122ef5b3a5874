"""Int8 on CPUs: its kinds, their requirements, and the choice of a kind for this machine.

:func:`.choice.choose_kind` shows all steps.
"""
