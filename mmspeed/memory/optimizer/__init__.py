"""Keep optimizer states and master weights in slower memory."""
