"""Mixture of experts over processes: which rows go to which process, and back."""
