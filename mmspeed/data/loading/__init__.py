"""Loading of batches from the cache to the device."""
