"""The first import of the server of ranks: nothing is collected while it imports, which would take a sixth of its time."""

import gc

gc.disable()
