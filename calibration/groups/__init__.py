"""Rows of a data set that are no independent samples: copies, windows over a series, films.

May import what :mod:`offramp.calibration` may. Start with :mod:`.find`. A group is on one side of
every split, and counts once in tuning and certificate, by its representative row.
"""
