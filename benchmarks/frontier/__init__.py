"""The frontier: gains of exits, an int8 copy, and both together under the same promise."""
