"""Building exits: heads and bridges on segments, confidence, recording, the policy."""
