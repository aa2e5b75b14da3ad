"""The last import of the server of ranks: no rank passes over what it imported, which takes a rank 0.1 s and copies 80 MB."""

import atexit
import gc

gc.collect()
gc.freeze()
gc.enable()
atexit.register(gc.unfreeze)  # else extensions report as leaks, at the end, what no collection has seen
