"""Building exits: heads and bridges after segments, confidences, recording, and the policy."""
