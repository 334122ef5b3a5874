"""A model without exits as a bundle of one segment: made without data, in seconds."""
