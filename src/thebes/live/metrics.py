"""The metrics for Prometheus: names that people know, in base units, with few labels and never a job id among them.

There is one object per server with a registry of its own. Methods take plain numbers; none of them can fail or block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from thebes import __version__

SHORT_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
LONG_S = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 12 * 3600.0, 86_400.0, 3 * 86_400.0, 7 * 86_400.0)
MEDIUM_S = (*SHORT_S, 30.0, 60.0, 300.0)
_OFF_S = (10.0, 60.0, 300.0, 900.0, 3600.0, 14_400.0, 86_400.0)
ERROR_S = (*(-off_s for off_s in reversed(_OFF_S)), 0.0, *_OFF_S)
RATIO = (1.0, 1.02, 1.05, 1.1, 1.2, 1.5, 2.0, 3.0, 5.0)
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


class Metrics:
    """Every figure the server keeps."""

    def __init__(self) -> None:
        disable_created_metrics()  # they would be a second series for each, which nobody asks for
        registry = self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"thebes_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"thebes_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"thebes_{name}", text, labels, buckets=buckets, registry=registry)

        self._lost = counter("lost_gpu_seconds", "GPU-seconds of work done and lost, by cause", "cause")
        self._eta_error = histogram("eta_error_seconds", "Real start minus promised start", ERROR_S)
        self._fragmentation = gauge(
            "fragmentation_ratio", "Share of the free GPUs that are not on the node with the most of them"
        )
        self._jct = histogram("jct_seconds", "From submission to completion", LONG_S, "tenant")
        self._queue_delay = histogram("queue_delay_seconds", "From submission to the first start", LONG_S, "tenant")
        self._preemptions = counter("preemptions", "Preemptions carried out", "policy")
        self._slowdown = histogram("placement_slowdown_ratio", "Step time over the best seen of that job", RATIO)
        self._decision = histogram("decision_seconds", "Time to decide and to name the actions", SHORT_S)
        self._jobs = gauge("jobs", "Jobs that have not ended, by state", "state", "tenant")
        self._gpus = gauge("gpus", "GPUs by state: busy, free, drained, down", "node", "state")
        self._submits = counter("submits", "Jobs accepted", "tenant")
        self._ends = counter("ends", "Jobs ended, by state", "state", "tenant")
        self._suspend = histogram("suspend_seconds", "From the notice until the GPUs are free", MEDIUM_S, "mechanism")
        self._resume = histogram("resume_seconds", "From the start until the first step", MEDIUM_S, "mechanism")
        self._start = histogram("start_seconds", "From the decision until the processes run", SHORT_S)
        self._http = histogram("http_request_seconds", "Requests, by route", SHORT_S, "method", "route", "status")
        self._commit = histogram("store_commit_seconds", "Time of one durable commit", SHORT_S)
        self._commit_size = histogram("store_commit_changes", "Changes in one commit", (1, 2, 5, 10, 20, 50, 100, 500))
        self._store_trouble = gauge("store_trouble", "1 while the store cannot be written")
        self._streams = gauge("streams", "Open streams of changes")
        gauge("info", "This build", "version").labels(__version__).set(1)
        self._seen_http: dict[tuple[str, str, int], Histogram] = {}
        self._refreshers: list[Callable[[], None]] = []

    def on_scrape(self, refresh: Callable[[], None]) -> None:
        """Call `refresh` before each answer, for gauges that are cheaper to set when somebody looks."""
        self._refreshers.append(refresh)

    def text(self) -> bytes:
        """The answer to GET /metrics."""
        for refresh in self._refreshers:
            refresh()
        return generate_latest(self.registry)

    # jobs

    def submitted(self, tenant: str, count: int = 1) -> None:
        self._submits.labels(tenant).inc(count)

    def started(self, tenant: str, *, took_s: float, queue_delay_s: float | None = None) -> None:
        """An incarnation runs; `queue_delay_s` is given only with a job's first start."""
        if queue_delay_s is not None:
            self._queue_delay.labels(tenant).observe(queue_delay_s)
        self._start.observe(took_s)

    def ended(self, tenant: str, state: str, jct_s: float) -> None:
        self._ends.labels(state, tenant).inc()
        if state == "completed":
            self._jct.labels(tenant).observe(jct_s)

    def preempted(self, policy: str) -> None:
        self._preemptions.labels(policy).inc()

    def lost(self, cause: str, gpu_seconds: float) -> None:
        """Work that must be done again; the cause is preemption, failure, node, timeout or cancel."""
        if gpu_seconds > 0:
            self._lost.labels(cause).inc(gpu_seconds)

    def suspended(self, mechanism: str, took_s: float) -> None:
        self._suspend.labels(mechanism).observe(took_s)

    def resumed(self, mechanism: str, took_s: float) -> None:
        self._resume.labels(mechanism).observe(took_s)

    def eta_error(self, error_s: float) -> None:
        self._eta_error.observe(error_s)

    def slowdown(self, ratio: float) -> None:
        self._slowdown.observe(ratio)

    # the cluster

    def decided(self, took_s: float) -> None:
        self._decision.observe(took_s)

    def fragmentation(self, ratio: float) -> None:
        self._fragmentation.set(ratio)

    def set_jobs(self, counts: Mapping[tuple[str, str], int]) -> None:
        """All living jobs by (state, tenant); what is not named is gone."""
        self._jobs.clear()
        for (state, tenant), count in counts.items():
            self._jobs.labels(state, tenant).set(count)

    def set_gpus(self, counts: Mapping[tuple[str, str], int]) -> None:
        """All GPUs by (node, state); what is not named is gone."""
        self._gpus.clear()
        for (node, state), count in counts.items():
            self._gpus.labels(node, state).set(count)

    # the server itself

    def committed(self, took_s: float, changes: int = 1) -> None:
        self._commit.observe(took_s)
        self._commit_size.observe(changes)

    def store_trouble(self, trouble: bool) -> None:
        self._store_trouble.set(1 if trouble else 0)

    def stream_opened(self) -> None:
        self._streams.inc()

    def stream_closed(self) -> None:
        self._streams.dec()

    def request(self, method: str, route: str, status: int, took_s: float) -> None:
        """`route` is the pattern (/v1/jobs/{job_id}), not the path."""
        key = (method, route, status)
        series = self._seen_http.get(key)
        if series is None:
            series = self._seen_http[key] = self._http.labels(method, route, f"{status}")
        series.observe(took_s)
