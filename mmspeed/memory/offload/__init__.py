"""Keep activations in the host's memory between forward and backward."""
