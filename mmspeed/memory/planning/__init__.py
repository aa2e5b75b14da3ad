"""Estimate and measure a step's memory, and choose policies under a budget."""
