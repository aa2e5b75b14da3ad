"""The order in which samples are trained on, and which rank trains on which."""
