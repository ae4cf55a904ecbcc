"""Rubick and the baselines beside it: the execution plan is part of the decision."""
