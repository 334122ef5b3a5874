"""What an answer is: agreement, differences, confidence, the exit check."""
