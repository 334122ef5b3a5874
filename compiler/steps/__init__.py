"""The commands step by step: compiling, checking and rehearsing a bundle."""
