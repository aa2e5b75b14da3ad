"""Planning: the cost of a run, and its share of the machine's peak."""
