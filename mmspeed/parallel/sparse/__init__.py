"""Compute sparse attention over sequences that are split over ranks."""
