"""What `thebes doctor` says about a machine, check by check."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from thebes.instance import doctor
from thebes.instance.doctor import Finding, check_disk, check_folder, check_port, check_store, examine
from thebes.live.config import Config, NodeConfig, save
from thebes.protocol.instance import Instance


@pytest.fixture
def instance(tmp_path: Path) -> Instance:
    made = Instance.at(tmp_path / "instance")
    made.create()
    return made


def only(findings: object) -> Finding:
    (finding,) = list(findings)  # type: ignore[call-overload]
    return finding


def test_every_finding_that_is_not_good_says_how_to_put_it_right(instance: Instance) -> None:
    findings = examine(instance)
    assert len(findings) >= 11
    assert [finding for finding in findings if finding.level != "ok" and not finding.fix] == []
    assert set(findings[0].as_dict()) == {"check", "level", "found", "fix"}


def test_nothing_is_changed(tmp_path: Path) -> None:
    examine(Instance.at(tmp_path / "not-there"))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    finding = only(check_folder(Instance.at(tmp_path / "file")))
    assert (finding.level, finding.found) == ("problem", f"{tmp_path / 'file'} is not a folder")


def test_a_token_that_others_can_read(instance: Instance) -> None:
    instance.token.touch(mode=0o644)
    (finding,) = [finding for finding in check_folder(instance) if finding.check == "token"]
    assert finding.level == "problem"
    assert finding.fix == f"chmod 600 {instance.token}"


def test_little_space(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(instance.dir)
    for free, level in ((50 << 20, "problem"), (500 << 20, "warning"), (5 << 30, "ok")):
        values = list(real)
        values[1], values[4] = 1, free  # f_frsize, f_bavail
        monkeypatch.setattr(os, "statvfs", lambda _, values=values: os.statvfs_result(values))
        assert only(check_disk(instance)).level == level


def test_a_port_that_is_taken(instance: Instance) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        save(instance.config, Config(nodes=[NodeConfig(name="n0", gpus=1, virtual=True)], port=port))
        finding = only(check_port(instance))
        assert (finding.level, finding.found) == ("problem", f"port {port} on 127.0.0.1: address already in use")
    assert only(check_port(instance)).found == f"{port} is free"


def test_a_store_that_is_none(instance: Instance) -> None:
    instance.store.write_bytes(b"x" * 100)
    (finding,) = [finding for finding in examine(instance) if finding.check == "store"]
    assert finding.level == "problem"
    assert "is not a Thebes store" in finding.found
    instance.store.unlink()
    assert only(check_store(instance)).level == "ok"


def test_a_check_that_fails_is_told_and_the_others_go_on(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Instance) -> object:
        raise RuntimeError("out of luck")

    monkeypatch.setitem(doctor._CHECKS, "clock", broken)  # type: ignore[arg-type]
    findings = {finding.check: finding for finding in examine(instance)}
    assert findings["clock"].found == "the check failed: RuntimeError: out of luck"
    assert findings["store"].level == "ok"


def test_machines_that_end_the_processes_of_who_logs_out(tmp_path: Path) -> None:
    main, more = tmp_path / "logind.conf", tmp_path / "conf.d"
    more.mkdir()
    files = (str(main), f"{more}/*.conf")
    assert not doctor._kills_at_logout(files)
    main.write_text("[Login]\n#KillUserProcesses=yes\n")
    assert not doctor._kills_at_logout(files)
    main.write_text("[Login]\nKillUserProcesses=yes\n")
    assert doctor._kills_at_logout(files)
    (more / "10.conf").write_text("[Login]\nKillUserProcesses=no\n")
    assert not doctor._kills_at_logout(files)


def test_a_network_file_system_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.file_system_of(Path("/proc/self")) == "proc"
    instance = Instance.at(tmp_path)
    monkeypatch.setattr(doctor, "file_system_of", lambda _: "nfs4")
    findings = list(check_folder(instance))
    assert any("network file system (nfs4)" in finding.found for finding in findings)


def test_on_slurm_gpus_and_agents_are_not_looked_for_here(instance: Instance) -> None:
    nodes = [NodeConfig(name=name, gpus=8) for name in ("n1", "n2")]
    save(instance.config, Config(nodes=nodes, engine="slurm"))
    with instance.hold_lock("keeper"), instance.hold_lock("controller"):
        found = {finding.check: finding for finding in examine(instance)}
    assert found["gpu"].level == "ok"
    assert "thebes engine check slurm" in found["gpu"].found
    assert found["instance"].found == "policy tiresias-l, 2 nodes of Slurm, 16 GPUs"
    assert "agent" not in found["running"].found
