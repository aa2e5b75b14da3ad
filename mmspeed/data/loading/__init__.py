"""From the cache to batches on the device."""
