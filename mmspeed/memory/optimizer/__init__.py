"""Optimizer states and master weights in slower memory."""
