"""Checkpoints: saved, found and loaded in any layout of ranks."""
