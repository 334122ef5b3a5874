"""Bundles of one segment, without exits: made from a model without data, in seconds."""
