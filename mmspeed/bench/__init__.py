"""Measurements of a machine, a config or a run; `mmspeed bench` starts them."""
