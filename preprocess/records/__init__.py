"""The tables and reports of a build."""
