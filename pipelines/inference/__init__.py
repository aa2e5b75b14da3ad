"""From prompts to videos."""
