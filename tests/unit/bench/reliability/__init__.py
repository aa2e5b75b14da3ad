"""Tests of the measured cost of what keeps a run alive."""
