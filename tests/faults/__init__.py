"""A campaign of injected faults: `make faults`."""
