"""Dry runs: compiling on made inputs, to see exits and times; nothing is certified.

::

    source      made inputs of a model
    policy      exits in use, chosen for their times alone
"""
