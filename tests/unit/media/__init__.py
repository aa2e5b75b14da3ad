"""Tests of mmspeed.media."""
