"""Commands around the product, and scripts for GPUs and examples; nothing else imports them."""
