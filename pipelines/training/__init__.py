"""Training: the pipeline and what it does besides steps."""
