"""A model as it is, as a bundle of one segment without exits: made without data, in seconds."""
