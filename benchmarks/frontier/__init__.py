"""The frontier: what exits, an int8 copy, and both together bring under the same promise."""
