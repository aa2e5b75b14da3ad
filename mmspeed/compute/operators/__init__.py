"""Operators of language models, each with an eager twin: `mmspeed.compute.registry` lists them."""
