"""Building of a cache: before training, during its first epoch, on one machine or many."""
