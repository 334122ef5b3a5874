"""Choice of exits and thresholds from recorded answers, and the reasons if none is in use."""
