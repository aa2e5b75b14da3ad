"""Optimizers: their construction, and those that update during backward."""
