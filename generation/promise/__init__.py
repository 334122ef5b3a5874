"""Promises about generated text, and thresholds that keep them on unseen prompts."""
