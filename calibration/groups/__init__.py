"""Rows of a data set that are no independent samples: copies, windows over a series, films."""
