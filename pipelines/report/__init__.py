"""The HTML pages of a run."""
