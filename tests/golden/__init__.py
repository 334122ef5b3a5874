"""What "behaviour unchanged" means: recorded figures, and a comparison of two checkouts."""
