"""Rows of a data set that are not independent samples: copies, windows over a series, films."""
