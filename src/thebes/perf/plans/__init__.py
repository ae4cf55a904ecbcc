"""Execution plans: what a model needs and how fast it trains under every plan (Rubick, arXiv 2408.08586)."""
