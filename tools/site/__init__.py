"""The site of the documentation: what mkdocs does to the pages, and the pages made of the code."""
