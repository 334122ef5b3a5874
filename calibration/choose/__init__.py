"""Choice of exits and thresholds from recorded answers, and the reasons if no exit is in use."""
