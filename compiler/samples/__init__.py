"""Properties of samples: effects of batch mates, padding, refused values, copies."""
