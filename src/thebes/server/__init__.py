"""Modules that a keeper of version 0.1 starts by these names. It lives through an upgrade, and knows only them."""
