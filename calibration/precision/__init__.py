"""Int8 on CPUs: kinds of it, what they need, and which is worth it on this machine.

:func:`.choice.choose_kind` reads like the table of contents.
"""
