"""Parts that all commands share: help in two layers, illegal combinations, shell completion."""
