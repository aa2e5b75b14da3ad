"""Decoding: probe files, select clips, decode, crop and scale frames."""
