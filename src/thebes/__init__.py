"""Thebes: a GPU cluster scheduler for deep-learning training, and the simulator that runs the very same policies."""

__version__ = "0.1.0"
