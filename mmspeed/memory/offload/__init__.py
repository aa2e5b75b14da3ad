"""Activations that lie in the host's memory between forward and backward."""
