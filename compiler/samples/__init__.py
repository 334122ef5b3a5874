"""What holds for samples: batch mates, padding, values that are refused, copies."""
