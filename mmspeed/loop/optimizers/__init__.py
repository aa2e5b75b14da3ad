"""Optimizers: how they are built, and those that update during backward."""
