"""Int8 on CPUs: kinds of it, their requirements, and the choice of one for this machine.

:func:`.choice.choose_kind` shows all steps.
"""
