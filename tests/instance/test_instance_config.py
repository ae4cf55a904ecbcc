"""What `thebes up` decides before it starts anything: options, the saved configuration, and what is refused."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from thebes.instance.main import PortTaken, listen, url_of
from thebes.instance.wanted import UpOptions, differences, wanted_config
from thebes.live.config import (
    Config,
    NodeConfig,
    admitted_policy,
    check_listening,
    live_policy,
    load,
    make,
    save,
    unused_placement,
)
from thebes.model.errors import UserError
from thebes.protocol.instance import Instance

VIRTUAL = Config(nodes=[NodeConfig(name="n0", gpus=8, virtual=True)])


def config(**changes: object) -> Config:
    return make(**{**VIRTUAL.model_dump(), **changes})


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[str, str]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not here")
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", key, "-out", cert, "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


def test_a_configuration_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    saved = config(policy="las", policy_settings=["quantum_s=5"], grace_s=2.5, port=7070)
    save(tmp_path / "config.json", saved)
    assert load(tmp_path / "config.json") == saved


def test_no_configuration_means_no_instance(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no instance in") as told:
        load(tmp_path / "config.json")
    assert "thebes up" in told.value.hint


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", r"it is not JSON \(.*line 1"),
        ("[]", "it is not a JSON object"),
        ("{}", "nodes: field required"),
        ('{"nodes": []}', "nodes: list should have at least 1 item"),
        ('{"nodes": [{"name": "n0", "gpus": 0}]}', r"nodes.0.gpus: input should be .* 1 \(found 0\)"),
        ('{"nodes": [{"name": "../x", "gpus": 1}]}', "nodes.0.name: "),
        ('{"nodes": [{"name": "a", "gpus": 1}, {"name": "a", "gpus": 1}]}', "two nodes have the same name"),
        ('{"nodes": [{"name": "a", "gpus": 1}], "grace_s": -1}', r"grace_s: .* \(found -1\)"),
        ('{"nodes": [{"name": "a", "gpus": 1}], "grase_s": 1}', "grase_s: extra inputs are not permitted"),
        ('{"nodes": [{"name": "a", "gpus": 1}], "port": "x"}', r"port: .* \(found 'x'\)"),
    ],
)
def test_a_configuration_that_cannot_be_understood_names_file_and_key(tmp_path: Path, text: str, fault: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(UserError, match=fault) as told:
        load(path)
    assert told.value.message.startswith(f"{path} cannot be understood: ")
    assert "jobs are kept in store.db" in told.value.hint
    assert path.read_text() == text


def test_a_newer_configuration_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"version": 2, "nodes": []}')
    with pytest.raises(UserError, match="was written by a newer Thebes"):
        load(tmp_path / "config.json")


def test_options_are_laid_over_what_was_saved() -> None:
    saved = config(policy="las", policy_settings=["quantum_s=5"], grace_s=5.0)
    assert wanted_config(saved, UpOptions()) == saved
    changed = wanted_config(saved, UpOptions(policy="fifo", port=7070))
    assert (changed.policy, changed.policy_settings, changed.port, changed.grace_s) == ("fifo", [], 7070, 5.0)
    more = wanted_config(saved, UpOptions(nodes=2))
    assert [(node.name, node.gpus, node.virtual) for node in more.nodes] == [("n0", 8, True), ("n1", 8, True)]


def test_a_policy_in_a_file_does_not_depend_on_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert wanted_config(VIRTUAL, UpOptions(policy="mine.py:Newest")).policy == f"{tmp_path}/mine.py:Newest"


def test_differences_are_told_for_people() -> None:
    other = config(policy="fifo", grace_s=5.0, nodes=[{"name": "n0", "gpus": 4, "virtual": True}])
    assert differences(VIRTUAL, other) == [
        "policy is tiresias-l, not fifo",
        "nodes is 8 virtual GPUs, not 4 virtual GPUs",
        "grace is 30.0, not 5.0",
    ]


def test_policies_that_need_durations_cannot_run_live() -> None:
    with pytest.raises(UserError, match="policy srtf needs to know how long each job will run") as told:
        live_policy(config(policy="srtf"))
    assert "tiresias-l" in told.value.hint


def test_a_setting_can_need_what_a_live_cluster_does_not_have() -> None:
    assert live_policy(config(policy="dally"))[0].name == "dally"
    with pytest.raises(UserError, match="policy dally needs profiles of the models"):
        live_policy(config(policy="dally", policy_settings=["skip_costly_waits=yes"]))


def test_a_placement_that_learns_from_speeds_in_other_places_cannot_run_live() -> None:
    assert live_policy(config(placement="skew", policy_settings=["placement.pack_limit=0.5"]))[1].name == "skew"
    learning = config(placement="skew", policy_settings=["placement.learn=yes"])
    with pytest.raises(UserError, match="placement skew cannot learn on a live cluster") as told:
        admitted_policy(learning)
    assert "placement.pack_limit" in told.value.hint
    assert live_policy(learning)[1].name == "skew"  # one that version 0.1 has started goes on


def test_a_placement_that_the_policy_does_not_use_is_told() -> None:
    chosen = config(policy="gandiva", placement="yarn")
    assert live_policy(chosen)[1].name == "consolidate"
    assert unused_placement(chosen) == (
        "policy gandiva does not use placement yarn: it seats jobs by affinity, and moves them later"
    )
    assert unused_placement(config(policy="gandiva")) == unused_placement(config(placement="yarn")) == ""


def test_policies_that_change_execution_plans_cannot_run_live() -> None:
    with pytest.raises(UserError, match="policy rubick changes the execution plans of running jobs") as told:
        live_policy(config(policy="rubick"))
    assert "--perf plans" in told.value.hint


@pytest.mark.parametrize(("policy", "settings"), [("gandiva", []), ("two-level", ["inner=gandiva"])])
def test_a_policy_that_shares_gpus_runs_live_but_not_under_packing(policy: str, settings: list[str]) -> None:
    assert live_policy(config(policy=policy, policy_settings=settings))[0].shares
    with pytest.raises(UserError, match=f"policy {policy} shares GPUs by itself: --packing would put") as told:
        live_policy(config(policy=policy, policy_settings=settings, packing=True))
    assert "leave --packing out" in told.value.hint


OWN = """
import numpy as np
import thebes


class Shrinks(thebes.Policy):
    resizes = True

    def decide(self, view):
        return thebes.fill(view, np.arange(len(view.jobs)), counts=view.jobs.min_gpus)


class Halves(thebes.Policy):
    shares = True

    def decide(self, view):
        return thebes.fill(view, np.arange(len(view.jobs)), shares=np.full(len(view.jobs), 0.5))
"""


@pytest.mark.parametrize("engine", ["slurm", "ray"])
@pytest.mark.parametrize(
    ("policy", "does"),
    [
        ("gandiva", "shares GPUs by itself"),
        ("gandiva-gavel", "shares GPUs by itself"),
        ("Halves", "shares GPUs by itself"),
        ("Shrinks", "changes how many GPUs a job has"),
    ],
)
def test_what_was_not_tried_with_an_engine_is_refused_there(
    tmp_path: Path, engine: str, policy: str, does: str
) -> None:
    """The local engine takes them all: tests/live/test_live_carries.py and the tutorial run them there."""
    own = tmp_path / "own.py"
    own.write_text(OWN)
    named = policy if policy.startswith("gandiva") else f"{own}:{policy}"
    with pytest.raises(UserError, match=f"policy {policy} {does}, which was not tried with the {engine} eng") as told:
        live_policy(config(policy=named, engine=engine))
    assert "--engine local" in told.value.hint
    assert live_policy(config(policy=named, engine="local"))[0].label == policy
    assert live_policy(config(policy="tiresias-l", engine=engine))[0].label == "tiresias-l"


def test_settings_reach_policy_and_placement() -> None:
    chosen = config(
        policy="tiresias-l", policy_settings=["promote_knob=3", "placement.pack_limit=0.5"], placement="skew"
    )
    policy, placement = live_policy(chosen)
    assert policy.promote_knob == 3  # type: ignore[attr-defined]
    assert placement.pack_limit == 0.5  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"policy": "tiresias"}, "unknown policy 'tiresias'"),
        ({"placement": "skewed"}, "unknown placement 'skewed'"),
        ({"policy_settings": ["promote=1"]}, "has no parameter 'promote'"),
        ({"policy_settings": ["cost.x=1"]}, "there is no 'cost' here"),
    ],
)
def test_what_cannot_be_chosen_is_refused(changes: dict[str, object], fault: str) -> None:
    with pytest.raises(UserError, match=fault):
        live_policy(config(**changes))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.8.8.8"])
def test_loopback_needs_no_certificate(host: str) -> None:
    check_listening(config(host=host))


@pytest.mark.parametrize("host", ["0.0.0.0", "8.8.8.8", "::"])
def test_a_public_address_without_tls_is_refused(host: str) -> None:
    with pytest.raises(UserError, match="tokens would travel in the clear") as told:
        check_listening(config(host=host))
    assert "--tls-cert" in told.value.hint


def test_a_certificate_opens_the_door(certificate: tuple[str, str]) -> None:
    cert, key = certificate
    check_listening(config(host="0.0.0.0", tls_cert=cert, tls_key=key))
    with pytest.raises(UserError, match="--tls-cert and --tls-key go together"):
        check_listening(config(host="0.0.0.0", tls_cert=cert))
    with pytest.raises(UserError, match="cannot be used"):
        check_listening(config(host="0.0.0.0", tls_cert=key, tls_key=cert))
    with pytest.raises(UserError, match="cannot be used: No such file or directory"):
        check_listening(config(host="0.0.0.0", tls_cert=cert, tls_key="/no/such.pem"))


def test_a_host_that_does_not_exist_is_told() -> None:
    with pytest.raises(UserError, match="no such address on this machine"):
        check_listening(config(host="no-such.invalid"))


def test_a_port_that_is_taken_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortTaken, match=f"port {port} on 127.0.0.1 is taken by another program") as told:
            listen(config(port=port), None)
        assert "--port" in told.value.hint


def test_without_a_port_the_last_one_is_taken_again_if_it_is_free() -> None:
    with listen(config(), None) as first:
        url = url_of(config(), first)
        with listen(config(), url) as second:
            assert url_of(config(), second) != url
    with listen(config(), url) as again:
        assert url_of(config(), again) == url


@pytest.mark.parametrize("last", ["nonsense", "http://127.0.0.1:99999999", "http://[::1]"])
def test_a_damaged_endpoint_does_not_keep_us_from_listening(last: str) -> None:
    listen(config(), last).close()


def test_an_endpoint_file_that_is_damaged_counts_as_none(tmp_path: Path) -> None:
    instance = Instance.at(tmp_path)
    instance.create()
    instance.endpoint.write_text(json.dumps({"port": 1}))
    assert instance.read_endpoint() is None


def test_a_gpu_that_has_gone_does_not_change_the_node() -> None:
    """This machine has none: what was configured stays, and the agent says which are missing."""
    saved = Config(nodes=[NodeConfig(name="n0", gpus=8, gpu_type="NVIDIA H200")])
    assert wanted_config(saved, UpOptions()) == saved
