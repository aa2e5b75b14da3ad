"""Training: the pipeline, validation, and memory advice."""
