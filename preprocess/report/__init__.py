"""`mmspeed check` and the data page."""
