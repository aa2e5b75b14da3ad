"""Inference: videos from prompts."""
