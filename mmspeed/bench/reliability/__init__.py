"""The cost of what keeps a run alive: `mmspeed bench reliability`."""
