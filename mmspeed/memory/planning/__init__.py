"""How much memory a step takes, and the choice under a budget."""
