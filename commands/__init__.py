"""Parts that all commands share: help in two layers, illegal combinations, shell completion.

May import: no other package of Offramp.
"""
