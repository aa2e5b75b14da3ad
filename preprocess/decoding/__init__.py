"""Decoding: files probed, clips chosen, frames decoded, cut and scaled."""
