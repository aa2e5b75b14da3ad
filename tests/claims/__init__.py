"""Proofs of the documentation's figures, most of them against other software: `python -m tests.claims.NAME` runs one in a checkout."""
