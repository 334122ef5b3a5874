"""Commands around the product, and scripts for GPU machines and examples; nobody imports them."""
