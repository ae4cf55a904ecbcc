"""Dally: delay scheduling by network tier, with timers that tune themselves."""
