"""The HTTP API: routes, answers, access, limits, streams. It decides nothing."""
