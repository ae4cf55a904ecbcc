"""How much one token may ask of the server: requests per second, open streams, bytes of a body.

These are pure state machines without a clock of their own: the caller tells the time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager

from pydantic import BaseModel, ConfigDict, Field

from thebes.live.errors import TooMany


class Limits(BaseModel):
    """Defaults are far above what people do, and far below what would hurt the controller. In `config.json`: limits."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    admin_requests_per_s: float = Field(default=2000.0, ge=1)
    user_requests_per_s: float = Field(default=1000.0, ge=1)
    stranger_requests_per_s: float = Field(default=50.0, ge=1)  # failed logins, by address
    plans_per_s: float = Field(default=10.0, ge=1)  # each plan runs the policy ahead, while all others wait
    body_bytes: int = Field(default=1 << 20, ge=1 << 16)
    snapshot_bytes: int = Field(default=256 << 20, ge=0)
    unpacked_bytes: int = Field(default=2 << 30, ge=0)
    streams_per_token: int = Field(default=64, ge=1)
    long_polls_per_token: int = Field(default=2048, ge=1)
    uploads_per_token: int = Field(default=4, ge=1)


class RateLimit:
    """A token bucket per key: `per_s` sustained, one second's worth at once."""

    MAX_KEYS = 10_000

    def __init__(self) -> None:
        self._buckets: dict[str, tuple[float, float]] = {}  # key -> (tokens left, as of)

    def take(self, key: str, per_s: float, now_s: float) -> None:
        """Count one request; TooMany if there were too many lately."""
        left, as_of_s = self._buckets.get(key, (per_s, now_s))
        left = min(per_s, left + (now_s - as_of_s) * per_s)
        if left < 1.0:
            raise TooMany(
                f"more than {per_s:g} requests per second",
                hint="slow down, or submit many like jobs as one array",
                retry_after_s=(1.0 - left) / per_s,
            )
        if len(self._buckets) >= self.MAX_KEYS and key not in self._buckets:
            self._forget(now_s)
        self._buckets[key] = (left - 1.0, now_s)

    def _forget(self, now_s: float) -> None:
        """Forget buckets that have not been touched for a second: they are full again, which is as good as none."""
        self._buckets = {key: entry for key, entry in self._buckets.items() if now_s - entry[1] < 1.0}


class TokenPlaces:
    """How many long-lived requests a key has open."""

    def __init__(self) -> None:
        self._open: defaultdict[tuple[str, str], int] = defaultdict(int)

    @contextmanager
    def one(self, key: str, kind: str, limit: int) -> Generator[None, None, None]:
        """Take a place for as long as the block runs."""
        where = (key, kind)
        if self._open[where] >= limit:
            raise TooMany(f"more than {limit} open {kind}", hint="close some first", retry_after_s=1.0)
        self._open[where] += 1
        try:
            yield
        finally:
            self._open[where] -= 1
            if not self._open[where]:
                del self._open[where]
