"""The video domain: diffusion transformers on cached latents and captions."""
