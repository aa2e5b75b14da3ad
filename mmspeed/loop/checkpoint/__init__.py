"""Checkpoints: saving, finding and loading in any layout of ranks."""
