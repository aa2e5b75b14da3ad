"""Reports on a data set: `mmspeed check` and the data page."""
