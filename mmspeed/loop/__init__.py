"""The loop: one optimizer step, the optimizer, the moving average, checkpoints and stop signals."""
