"""Single-device mathematics: one function per operation, an eager twin beside every fast path."""
