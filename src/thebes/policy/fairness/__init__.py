"""Fairness across organisations and users: Themis, finish-time fairness, two levels."""
