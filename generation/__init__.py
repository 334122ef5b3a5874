"""Extension: text, token by token, with exits at every token (CALM; E3 5.1.3)."""
