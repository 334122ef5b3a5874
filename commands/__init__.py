"""Parts that all commands share: help in two layers, shell completion, pages and SVG."""
