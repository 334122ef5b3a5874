"""The documentation site: hooks of mkdocs, and pages that are generated from the code."""
