"""Methods: how the models of a domain learn. `mmspeed/config/methods.py` is the table of their names."""
