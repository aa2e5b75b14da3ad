"""Proofs of the documentation's figures against other software; `mmspeed bench` starts them in a checkout."""
