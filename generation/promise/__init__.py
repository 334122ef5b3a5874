"""What is promised of generated text, and thresholds that keep it on unseen prompts."""
