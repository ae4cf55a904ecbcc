"""The API's parts by themselves: limits, messages, metrics and logs."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from thebes.api.answers import masked, said_in
from thebes.api.base import parse
from thebes.jobspec.spec import JobSpec
from thebes.live import jsonlog
from thebes.live.errors import Conflict, Invalid, NotFound, TooMany, headers_of, status_of
from thebes.live.limits import RateLimit, TokenPlaces
from thebes.live.metrics import Metrics
from thebes.model.errors import UserError
from thebes.store import StoreUnavailable


class TestRate:
    def test_sustained_rate_and_one_second_at_once(self) -> None:
        rate, passed = RateLimit(), 0
        for step in range(10_000):  # ten seconds, a request per millisecond, 100 per second allowed
            try:
                rate.take("a", 100.0, step / 1000.0)
                passed += 1
            except TooMany:
                pass
        assert passed == pytest.approx(100 + 100 * 10, abs=2)

    def test_keys_do_not_share(self) -> None:
        rate = RateLimit()
        rate.take("a", 1.0, 0.0)
        rate.take("b", 1.0, 0.0)
        with pytest.raises(TooMany, match="more than 1 requests per second") as caught:
            rate.take("a", 1.0, 0.5)
        assert caught.value.retry_after_s == pytest.approx(0.5)
        rate.take("a", 1.0, 1.0)

    def test_memory_is_bounded(self) -> None:
        rate = RateLimit()
        for number in range(3 * RateLimit.MAX_KEYS):
            rate.take(f"address {number}", 50.0, number * 0.001)
        assert len(rate._buckets) <= RateLimit.MAX_KEYS


def test_places_are_given_back() -> None:
    places = TokenPlaces()
    for _ in range(3):
        with places.one("a", "streams", 1):
            with places.one("b", "streams", 1), places.one("a", "uploads", 1):
                pass
            with pytest.raises(TooMany, match="more than 1 open streams"), places.one("a", "streams", 1):
                pass


class TestErrors:
    def test_status_of_any_user_error(self) -> None:
        assert status_of(UserError("x")) == 400
        assert status_of(NotFound("x")) == 404
        assert status_of(Conflict("x")) == 409
        assert status_of(StoreUnavailable("x")) == 503
        assert headers_of(TooMany("x", retry_after_s=0.2)) == {"retry-after": "1"}

    @pytest.mark.parametrize(
        ("body", "message", "hint"),
        [
            ({"command": ["x"], "gpu": 2}, "a job has no field 'gpu'", "did you mean 'gpus'?"),
            ({}, "a job needs 'command'", "add 'command'"),
            ({"command": ["x"], "gpus": 0}, "gpus: input should be greater than or equal to 1", "got 0"),
            ({"command": ["x"], "gpus": "many"}, "gpus: input should be a valid integer", "got 'many'"),
            ({"command": ["x"], "gpus": 3, "nodes": 2}, "3 GPUs do not spread evenly over 2 nodes", ""),
            ({"command": ["x"], "env": {"A B": "1"}}, "env: 'A B' is not the name of an environment variable", ""),
            (
                {"command": ["x"], "workdir": "here"},
                "workdir: the work directory must be an absolute path",
                "got 'here'",
            ),
            ({"command": ["x"], "gpus": 0, "nodes": 0}, "(and 1 more fault)", ""),
            ([], "input should be", ""),
        ],
    )
    def test_one_sentence_that_names_the_field(self, body: Any, message: str, hint: str) -> None:
        with pytest.raises(Invalid) as caught:
            parse(JobSpec, json.dumps(body).encode(), what="a job")
        assert message in caught.value.message
        assert hint in caught.value.hint
        assert "\n" not in caught.value.message

    @pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"command": ["\\ud800"]}'])
    def test_what_is_not_json(self, raw: bytes) -> None:
        with pytest.raises(Invalid):
            parse(JobSpec, raw, what="a job")

    def test_values_of_the_environment_are_never_repeated(self) -> None:
        for env in ({"TOKEN": 12345678}, {"TOKEN": "12345678\0"}, {"THEBES_X": "12345678"}, "12345678"):
            with pytest.raises(Invalid) as caught:
                parse(JobSpec, json.dumps({"command": ["x"], "env": env}).encode())
            assert "12345678" not in str(caught.value)


class TestMasks:
    def test_names_without_values(self) -> None:
        spec = JobSpec(command=["x"], env={"HF_TOKEN": "hf_secret"}).model_dump_json()
        assert masked(spec)["env"] == {"HF_TOKEN": "***"}

    def test_command_is_shortened(self) -> None:
        assert said_in(JobSpec(command=["python", "a b.py"]).model_dump_json())["command"] == "python 'a b.py'"
        assert len(said_in(JobSpec(command=["x" * 5000]).model_dump_json())["command"]) == 200


class TestMetrics:
    NAMES = (
        "thebes_lost_gpu_seconds_total",
        "thebes_eta_error_seconds_bucket",
        "thebes_fragmentation_ratio",
        "thebes_jct_seconds_bucket",
        "thebes_queue_delay_seconds_bucket",
        "thebes_preemptions_total",
        "thebes_placement_slowdown_ratio_bucket",
        "thebes_decision_seconds_bucket",
        "thebes_jobs",
        "thebes_gpus",
        "thebes_submits_total",
        "thebes_http_request_seconds_bucket",
        "thebes_store_commit_seconds_bucket",
    )

    @pytest.fixture
    def filled(self) -> Metrics:
        metrics = Metrics()
        metrics.submitted("lab", 3)
        metrics.started("lab", queue_delay_s=1.0, took_s=0.05)
        metrics.ended("lab", "completed", 100.0)
        metrics.ended("lab", "failed", 100.0)
        metrics.preempted("tiresias-l")
        metrics.lost("preemption", 12.5)
        metrics.lost("failure", 0.0)
        metrics.suspended("checkpoint", 2.0)
        metrics.resumed("checkpoint", 2.0)
        metrics.eta_error(-30.0)
        metrics.slowdown(1.1)
        metrics.decided(0.002)
        metrics.fragmentation(0.25)
        metrics.set_jobs({("queued", "lab"): 2, ("running", "lab"): 1})
        metrics.set_gpus({("n0", "busy"): 8})
        metrics.committed(0.003, 10)
        metrics.store_trouble(False)
        metrics.request("GET", "/v1/jobs/{job_id}", 200, 0.001)
        return metrics

    def samples(self, metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        families = text_string_to_metric_families(metrics.text().decode())
        found = [sample for family in families for sample in family.samples]
        return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in found}

    def test_names_people_can_build_dashboards_on(self, filled: Metrics) -> None:
        names = {name for name, _ in self.samples(filled)}
        assert set(self.NAMES) <= names

    def test_values(self, filled: Metrics) -> None:
        found = self.samples(filled)
        assert found["thebes_submits_total", (("tenant", "lab"),)] == 3
        assert found["thebes_lost_gpu_seconds_total", (("cause", "preemption"),)] == 12.5
        assert found["thebes_jct_seconds_count", (("tenant", "lab"),)] == 1

    def test_what_is_gone_is_gone(self, filled: Metrics) -> None:
        filled.set_jobs({("running", "lab"): 1})
        filled.set_gpus({})
        found = self.samples(filled)
        assert ("thebes_jobs", (("state", "queued"), ("tenant", "lab"))) not in found
        assert not any(name == "thebes_gpus" for name, _ in found)

    def test_no_job_is_ever_a_label(self, filled: Metrics) -> None:
        labels = {label for _, labels in self.samples(filled) for label, _ in labels}
        known = {
            "cause",
            "tenant",
            "policy",
            "state",
            "node",
            "mechanism",
            "method",
            "route",
            "status",
            "version",
            "le",
        }
        assert labels <= known

    def test_gauges_that_are_set_when_asked(self) -> None:
        metrics = Metrics()
        metrics.on_scrape(lambda: metrics.set_jobs({("queued", "lab"): 7}))
        assert self.samples(metrics)["thebes_jobs", (("state", "queued"), ("tenant", "lab"))] == 7

    def test_two_servers_in_one_process(self) -> None:
        Metrics().submitted("a")
        assert ("thebes_submits_total", (("tenant", "a"),)) not in self.samples(Metrics())


class TestLogs:
    def test_one_object_per_line(self, tmp_path: Path) -> None:
        handler = jsonlog.start(tmp_path / "log/controller.jsonl")
        try:
            log = jsonlog.get("test")
            log.info("job %s\nstarted", "17", extra={"fields": {"node": "n0", "path": tmp_path}})
            log.debug("too fine")
            try:
                raise RuntimeError("broken")
            except RuntimeError:
                log.exception("internal error", extra={"fields": {"id": "abc"}})
        finally:
            jsonlog.stop(handler)
        first, second = (json.loads(line) for line in (tmp_path / "log/controller.jsonl").read_text().splitlines())
        assert first["message"] == "job 17\nstarted"
        assert first["level"] == "info"
        assert first["logger"] == "thebes.test"
        assert first["node"] == "n0"
        assert first["time"].endswith("Z")
        assert second["id"] == "abc"
        assert "RuntimeError: broken" in second["traceback"]
        assert (tmp_path / "log/controller.jsonl").stat().st_mode & 0o077 == 0

    def test_files_change_at_their_size(self, tmp_path: Path) -> None:
        path = tmp_path / "controller.jsonl"
        handler = jsonlog.start(path, max_bytes=10_000, kept=2)
        try:
            for number in range(1000):
                jsonlog.get("test").warning("line", extra={"fields": {"number": number}})
        finally:
            jsonlog.stop(handler)
        files = sorted(tmp_path.iterdir())
        assert [one.name for one in files] == ["controller.jsonl", "controller.jsonl.1", "controller.jsonl.2"]
        assert all(one.stat().st_size <= 10_000 for one in files)
        assert json.loads(path.read_text().splitlines()[-1])["number"] == 999

    def test_a_full_disk_stops_nobody(self, capsys: pytest.CaptureFixture[str]) -> None:
        handler = jsonlog.start(Path("/dev/full"), max_bytes=0)
        try:
            jsonlog.get("test").error("cannot be written")
        finally:
            jsonlog.stop(handler)
        assert capsys.readouterr().err == ""

    def test_a_mistake_of_our_own_in_a_message_is_not_hidden(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        handler = jsonlog.start(tmp_path / "controller.jsonl")
        try:
            jsonlog.get("test").error("%d jobs", "three")
            jsonlog.get("test").error("and on it goes")
        finally:
            jsonlog.stop(handler)
        assert "TypeError" in capsys.readouterr().err
        [line] = (tmp_path / "controller.jsonl").read_text().splitlines()
        assert json.loads(line)["message"] == "and on it goes"

    def test_what_comes_after_finds_logging_as_it_was(self, tmp_path: Path) -> None:
        def state() -> list[object]:
            loggers = [logging.getLogger(name) for name in ("thebes", "uvicorn", "uvicorn.access")]
            return [(one.level, one.propagate, one.disabled, list(one.handlers)) for one in loggers]

        before = state()
        handler = jsonlog.start(tmp_path / "controller.jsonl")
        assert state() != before
        jsonlog.stop(handler)
        assert state() == before
