"""Properties of samples: effects of the batch, padding, refused values, and equal rows."""
