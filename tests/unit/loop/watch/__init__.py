"""Tests of the watch over a run."""
