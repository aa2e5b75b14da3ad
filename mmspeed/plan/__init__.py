"""Planning: what a run will cost, and how near the machine's peak it comes."""
