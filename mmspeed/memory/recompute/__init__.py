"""Activations that backward computes again."""
