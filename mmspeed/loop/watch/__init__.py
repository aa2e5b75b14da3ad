"""The watch over a run: phases and their limits, signs of life of all ranks, and slow ranks."""
