"""The order of samples in training, and their assignment to ranks."""
