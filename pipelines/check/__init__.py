"""Checks of a config before it is trained: layouts against one process, published models against their pipelines, its data."""
