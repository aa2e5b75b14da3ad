"""Faults injected one at a time into the sources, and the tests that catch them: `python -m tests.mutations --help`."""
