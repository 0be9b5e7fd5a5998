"""Training: data, optimiser, one jitted step, and the order of events."""
