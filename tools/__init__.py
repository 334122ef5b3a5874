"""Commands around the product, and scripts for GPU machines and examples."""
