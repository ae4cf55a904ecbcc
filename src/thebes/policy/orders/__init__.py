"""Policies that are one order over all jobs: from FIFO to Tiresias."""
