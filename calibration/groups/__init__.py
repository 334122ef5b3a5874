"""Rows of a data set that are not independent samples: equal rows, series, films."""
