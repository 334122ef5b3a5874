"""Properties of samples: effects of batches, padding, refused values, equal rows."""
