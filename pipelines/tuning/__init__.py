"""Measured choices: memory policies and batch sizes."""
