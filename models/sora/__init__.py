"""The Sora-class diffusion transformer, its layers and its named sizes."""
