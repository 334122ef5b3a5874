"""The bundle's ``report.html``: what a person looks at."""

from offramp.compiler.report.page import render_report

__all__ = ["render_report"]
