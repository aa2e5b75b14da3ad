"""A run: its parts, its folder, its telemetry and its result."""
