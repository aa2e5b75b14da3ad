"""What torch.compile leaves out of its graphs."""

from __future__ import annotations

from torch import _compile

# A graph breaks at a function under this, and the function runs as it is written. `torch.compiler.disable` is the same, but loads the
# compiler when a file is imported; this does so at the first call.
outside_graphs = _compile._disable_dynamo
