"""Carries actions out: real processes on one machine (`local`); Slurm and Ray fit the same contract."""
