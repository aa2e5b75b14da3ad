"""Diffusion: objectives, noise schedules and samplers."""
