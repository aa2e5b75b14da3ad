"""Video codecs: pixels to latents and back."""
