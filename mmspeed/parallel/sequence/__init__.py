"""Attend over sequences that are split over ranks: ring and all-to-all."""
