"""Try a parallel layout against one process, on a small model."""
