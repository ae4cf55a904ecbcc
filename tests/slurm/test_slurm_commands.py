"""What Slurm's commands are called with and what their answers mean, on output recorded from Slurm 22.05. No Slurm."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from thebes.engine.slurm import nodes as slurm_nodes
from thebes.engine.slurm.client import Slurm, clean_env
from thebes.engine.slurm.commands import (
    AllocationRequest,
    NodeGroup,
    SlurmError,
    SlurmTerms,
    failure,
    granted_job,
    last_words,
    salloc_args,
    scancel_args,
    squeue_args,
    srun_args,
    trouble_of,
)
from thebes.engine.slurm.records import (
    Gres,
    expand_hosts,
    parse_config,
    parse_gres,
    parse_job,
    parse_node,
    parse_partition,
    parse_queue,
    parse_record,
    parse_reservation,
    parse_states,
    parse_topology,
    seconds_of,
)
from thebes.model.errors import UserError

RECORDED = Path(__file__).parent / "recorded"


def recorded(name: str) -> str:
    return (RECORDED / f"{name}.txt").read_text()


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[1,3]", ["n1", "n3"]),
        ("n[1-3,07],gpu4", ["n1", "n2", "n3", "n07", "gpu4"]),
        ("r[1-2]n[08-10]", ["r1n08", "r1n09", "r1n10", "r2n08", "r2n09", "r2n10"]),
        ("a-[1-2].site", ["a-1.site", "a-2.site"]),
        ("", []),
        ("(null)", []),
        ("n[x", ["n[x"]),
    ],
)
def test_lists_of_hosts(text: str, names: list[str]) -> None:
    assert expand_hosts(text) == names


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("gpu:8", [Gres("", 8)]),
        ("gpu", [Gres("", 1)]),
        ("gpu:a100:2(IDX:0-1)", [Gres("a100", 2, (0, 1))]),
        ("gpu:a100:3(IDX:0,2-3),craynetwork:4", [Gres("a100", 3, (0, 2, 3))]),
        ("gpu:a100:8(S:0-1)", [Gres("a100", 8)]),
        ("gres:gpu:g3:1,gres:gpu:g5:1", [Gres("g3", 1), Gres("g5", 1)]),
        ("gres/gpu:h100=4", [Gres("h100", 4)]),
        ("gpu:g2:0(IDX:N/A)", [Gres("g2", 0)]),
        ("gpu:2(IDX:4,6)", [Gres("", 2, (4, 6))]),
        ("(null)", []),
        ("", []),
        ("mps:100", []),
    ],
)
def test_lists_of_gpus(text: str, found: list[Gres]) -> None:
    assert parse_gres(text) == found


def test_a_record_keeps_values_with_blanks_and_keys_that_come_twice() -> None:
    assert parse_record("NodeName=n1 OS=Linux 6.1 #1 SMP  Reason=fan [root@now]") == [
        ("NodeName", "n1"),
        ("OS", "Linux 6.1 #1 SMP"),
        ("Reason", "fan [root@now]"),
    ]
    assert parse_record("CPUs/Task=1 ReqB:S:C:T=0:0:*:* Nodes=n1 GRES=a Nodes=n2 GRES=b")[2:] == [
        ("Nodes", "n1"),
        ("GRES", "a"),
        ("Nodes", "n2"),
        ("GRES", "b"),
    ]


def test_nodes() -> None:
    nodes = {node.name: node for node in map(parse_node, recorded("node").splitlines())}
    n1 = nodes["n1"]
    assert n1.address == "10.0.0.1"
    assert n1.states == {"MIXED"}
    assert n1.gpus == tuple(Gres(f"g{number}", 1) for number in range(8))
    assert n1.used == (0, 1, 3, 5)
    assert n1.used_count == 4
    assert (n1.cpus, n1.memory_mib) == (64, 64000)
    assert n1.features == ("thebes-virtual",)
    assert nodes["n6"].states == {"IDLE", "DRAIN"}
    assert nodes["n6"].reason == "new disk = bad"
    assert nodes["n7"].states == {"DOWN"}
    assert nodes["n7"].reason == "fan"
    assert nodes["cpu1"].states == {"DOWN", "NOT_RESPONDING"}
    assert nodes["cpu1"].gpus == ()


def test_states_with_marks() -> None:
    assert parse_states("DOWN*") == {"DOWN", "NOT_RESPONDING"}
    assert parse_states("IDLE+DRAIN+NOT_RESPONDING") == {"IDLE", "DRAIN", "NOT_RESPONDING"}
    assert parse_states("idle~") == {"IDLE", "POWERED_DOWN"}


def test_jobs_and_who_has_which_gpus() -> None:
    jobs = {job.job: job for job in map(parse_job, recorded("job").splitlines())}
    *_, first, second, third, foreign = jobs.values()
    assert first.name == "thebes-x-j1.1"
    assert first.gpus == {"n1": (3, 5), "n3": (3, 5)}
    assert first.counts == {"n1": 2, "n3": 2}
    assert second.gpus == {"n1": (0, 1)}
    assert third.gpus == {"n2": (6,)}
    assert (foreign.user, foreign.nodes, foreign.gpus) == ("nobody", ("n4",), {"n4": (2,)})


def test_leaf_switches_are_racks() -> None:
    racks = parse_topology(recorded("topology"))
    assert racks == {f"n{number}": f"rack{(number + 1) // 2}" for number in range(1, 9)}


def test_partitions_and_reservations() -> None:
    main, cpu = map(parse_partition, recorded("partition").splitlines())
    assert (main.name, main.default, main.up, main.max_time) == ("main", True, True, "UNLIMITED")
    assert main.nodes == tuple(f"n{number}" for number in range(1, 9))
    assert not main.exclusive
    assert (cpu.name, cpu.default) == ("cpu", False)
    (ours,) = map(parse_reservation, recorded("reservation").splitlines())
    assert (ours.name, ours.nodes, ours.users, ours.state) == ("ours", ("n7", "n8"), ("nobody",), "ACTIVE")


def test_configuration() -> None:
    config = parse_config(recorded("config"))
    assert config["SelectType"] == "select/cons_tres"
    assert config["SLURM_VERSION"] == "22.05.8"
    assert seconds_of(config["KillWait"]) == 5.0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("UNLIMITED", None),
        ("INFINITE", None),
        ("", None),
        ("90", 90.0),
        ("30 sec", 30.0),
        ("15:00", 900.0),
        ("02:00:00", 7200.0),
        ("1-12:00:00", 129600.0),
        ("7-0", 604800.0),
    ],
)
def test_times(text: str, seconds: float | None) -> None:
    assert seconds_of(text) == seconds


def test_the_queue_knows_parts_of_heterogeneous_jobs_and_odd_names() -> None:
    queue = parse_queue(recorded("queue"))
    running = [one for one in queue if not one.over]
    assert [(one.job - one.leader, one.name, one.nodes) for one in running] == [
        (0, "thebes-x-j1.1", ("n1", "n3")),
        (0, "a|b c", ("n1",)),
        (1, "a|b c", ("n2",)),
        (0, "no-shell", ("n4",)),
    ]
    assert running[-1].uid == 65534
    assert any(one.over and one.state == "CANCELLED" for one in queue)


REQUEST = AllocationRequest(
    name="thebes-ab-7.1",
    comment="Thebes job 7",
    groups=(NodeGroup(("n1", "n2"), "gpu:g0:1,gpu:g1:1", 16), NodeGroup(("n4",), "gpu:g6:1", 8, 8000)),
    wait_s=10,
    terms=SlurmTerms("main", "ours", qos="gpu-low"),
    time="1-00:00:00",
)


def test_an_uneven_gang_is_asked_for_as_one_heterogeneous_job() -> None:
    common = [
        *("--job-name=thebes-ab-7.1", "--comment=Thebes job 7", "--partition=main", "--reservation=ours"),
        *("--qos=gpu-low", "--time=1-00:00:00"),
    ]
    assert salloc_args(REQUEST) == [
        *("salloc", "--no-shell", "--immediate=10", *common),
        *("--nodes=2", "--nodelist=n1,n2", "--ntasks-per-node=1", "--cpus-per-task=16", "--gres=gpu:g0:1,gpu:g1:1"),
        *(":", *common),
        *("--nodes=1", "--nodelist=n4", "--ntasks-per-node=1", "--cpus-per-task=8", "--gres=gpu:g6:1", "--mem=8000M"),
    ]


def test_whole_nodes_are_asked_for_exclusively() -> None:
    args = salloc_args(AllocationRequest("a", "b", (NodeGroup(("n1",), "gpu:8", 64, 64000),), 10, whole_nodes=True))
    assert "--exclusive" in args
    assert not [word for word in args if word.startswith(("--cpus-per-task", "--mem"))]


def test_one_step_with_one_task_per_node() -> None:
    args = srun_args(12, REQUEST.groups, ["python", "step"], output="log", whole=False)
    assert args[:4] == ["srun", "--jobid=12", "--quiet", "--het-group=0"]
    second = args[args.index(":") :]
    assert second[1:4] == ["--het-group=1", "--nodes=1", "--ntasks=1"]
    assert args.count("--kill-on-bad-exit=0") == args.count("--wait=0") == args.count("step") == 2
    assert "--het-group=0" not in srun_args(12, REQUEST.groups[:1], ["step"], output="log", whole=True)


def test_other_calls() -> None:
    assert scancel_args([3, 4]) == ["scancel", "--quiet", "3", "4"]
    assert scancel_args([3], signal_name="KILL") == ["scancel", "--quiet", "--full", "--signal=KILL", "3"]
    assert squeue_args(uid=7, over_too=True, jobs=[1, 2])[-3:] == ["--user=7", "--states=all", "--jobs=1,2"]


@pytest.mark.parametrize(
    ("stderr", "trouble"),
    [
        ("salloc: error: Unable to allocate resources: Connection timed out", "busy"),
        ("salloc: error: Unable to allocate resources: Requested nodes are busy", "busy"),
        ("salloc: error: Job submit/allocate failed: Requested node configuration is not available", "busy"),
        ("salloc: error: Job submit/allocate failed: Invalid partition name specified", "partition"),
        ("salloc: error: Job submit/allocate failed: Requested reservation is invalid", "reservation"),
        (
            "salloc: error: Job submit/allocate failed: Invalid account or account/partition combination specified",
            "account",
        ),
        ("srun: error: Unable to allocate resources: Invalid qos specification", "account"),
        ("slurm_load_partitions: Unable to contact slurm controller (connect failure)", "silent"),
        ("sinfo: error: s_p_parse_file: cannot stat file /x: No such file or directory", "silent"),
        ("scancel: error: Kill job error on job id 7: Invalid job id specified", "unknown-job"),
        ("scancel: error: Kill job error on job id 7: Access/permission denied", "denied"),
        ("srun: error: something new", "other"),
    ],
)
def test_what_an_error_means(stderr: str, trouble: str) -> None:
    assert trouble_of(stderr) == trouble


def test_what_an_error_says() -> None:
    said = 'salloc: unrecognized option "--x"\nTry "salloc --help" for more information\n'
    assert last_words(said) == 'unrecognized option "--x"'
    assert last_words("") == ""
    assert str(failure("salloc", 1, "salloc: error: no\n")) == "salloc: no"
    assert str(failure("srun", -9, "")) == "srun was ended by SIGKILL"
    silent = failure("sinfo", 1, "Unable to contact slurm controller (connect failure)")
    assert str(silent) == "slurmctld does not answer (Unable to contact slurm controller (connect failure))"
    assert granted_job("salloc: Pending job allocation 3\nsalloc: Granted job allocation 3\n") == 3
    assert granted_job("") == 0


def test_commands_see_neither_our_secrets_nor_the_slurm_job_that_we_may_run_in() -> None:
    env = {"PATH": "/bin", "THEBES_HOME_KEY": "x", "SLURM_JOB_ID": "3", "SLURM_CONF": "/c", "SALLOC_PARTITION": "p"}
    assert clean_env(env) == {"PATH": "/bin", "SLURM_CONF": "/c"}


def test_a_machine_without_slurm_is_told_so() -> None:
    async def story() -> None:
        with pytest.raises(SlurmError) as caught:
            await Slurm({"PATH": "/nonexistent"}).run(["scontrol", "ping"])
        assert caught.value.trouble == "missing"
        told = slurm_nodes.explain(caught.value)
        assert told.message == "there is no `scontrol` in PATH: this is not a machine of a Slurm cluster"
        assert "login node" in told.hint

    asyncio.run(story())


def test_a_slurm_conf_that_is_not_there_is_told(tmp_path: Path) -> None:
    async def story() -> None:
        with pytest.raises(SlurmError) as caught:
            await Slurm({"PATH": "/bin", "SLURM_CONF": str(tmp_path / "x")}).run(["scontrol", "ping"])
        told = slurm_nodes.explain(caught.value)
        assert told.message == f"SLURM_CONF names {tmp_path / 'x'}, which is not there"
        assert "SLURM_CONF" in told.hint

    asyncio.run(story())


def test_a_silent_command_is_given_up(tmp_path: Path) -> None:
    program = tmp_path / "scontrol"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)

    async def story() -> None:
        slurm = Slurm({"PATH": f"{tmp_path}:{os.environ['PATH']}"})
        with pytest.raises(SlurmError) as caught:
            await slurm.run([str(program), "ping"], timeout_s=0.2)
        assert caught.value.trouble == "silent"

    asyncio.run(story())


# Nodes ---------------------------------------------------------------------------------------------------------------

NODES = [parse_node(line) for line in recorded("node").splitlines()]
N1 = next(node for node in NODES if node.name == "n1")
PARTITIONS = [parse_partition(line) for line in recorded("partition").splitlines()]
RESERVATIONS = [parse_reservation(line) for line in recorded("reservation").splitlines()]
PLAIN = parse_node(
    "NodeName=h1 NodeAddr=h1 State=MIXED Gres=gpu:a100:8 GresUsed=gpu:a100:3(IDX:0-2) CPUTot=64 RealMemory=1000"
)


def test_exact_ids_where_each_gpu_has_a_type_of_its_own() -> None:
    config = parse_config(recorded("config"))
    with_gpus = [node for node in NODES if node.gpus]
    assert slurm_nodes.mode_of(with_gpus, PARTITIONS[0], config) == "exact"
    assert slurm_nodes.mode_of([PLAIN], PARTITIONS[0], config) == "counts"
    assert slurm_nodes.mode_of(with_gpus, PARTITIONS[0], {"SelectType": "select/linear"}) == "whole"
    exclusive = parse_partition("PartitionName=x Nodes=n1 OverSubscribe=EXCLUSIVE State=UP")
    assert slurm_nodes.mode_of(with_gpus, exclusive, config) == "whole"
    assert slurm_nodes.gres_for(N1, [5, 3]) == "gpu:g3:1,gpu:g5:1"
    assert slurm_nodes.gres_for(PLAIN, [5, 3]) == "gpu:a100:2"
    assert slurm_nodes.share_of(PLAIN, 2) == (16, 250)


def test_a_share_of_a_node_is_whole_cores_of_what_jobs_may_have() -> None:
    """A core too many for one job, and the last GPU of the node finds none."""
    odd = parse_node(
        "NodeName=h2 Gres=gpu:8 CPUTot=44 CPUEfctv=40 ThreadsPerCore=2 RealMemory=90000 MemSpecLimit=10000 State=IDLE"
    )
    shares = [slurm_nodes.share_of(odd, gpus) for gpus in (1, 3, 8)]
    assert shares == [(4, 10000), (14, 30000), (40, 80000)]  # 2, 7 and 20 cores
    assert slurm_nodes.share_of(parse_node("NodeName=h3 Gres=gpu:8 CPUTot=4 RealMemory=800"), 1) == (1, 100)


@pytest.mark.parametrize(
    ("partition", "config", "share"),
    [
        ("", {}, (4, 10000)),
        ("", {"MaxMemPerCPU": "2000"}, (4, 8000)),  # Slurm would add CPUs to a job that asks for more
        ("", {"MaxMemPerCPU": "2000", "MaxMemPerNode": "UNLIMITED"}, (4, 8000)),
        ("MaxMemPerCPU=2100", {"MaxMemPerCPU": "2000"}, (4, 8400)),
        ("MaxMemPerNode=9000", {}, (4, 9000)),
        ("MaxCPUsPerNode=32", {}, (4, 10000)),
        ("MaxCPUsPerNode=24", {}, (2, 10000)),
        ("MaxCPUsPerNode=24 MaxMemPerCPU=1000", {}, (2, 2000)),
        ("MaxCPUsPerNode=UNLIMITED MaxMemPerNode=UNLIMITED", {}, (4, 10000)),
    ],
)
def test_limits_of_the_partition_and_of_the_cluster(
    partition: str, config: dict[str, str], share: tuple[int, int]
) -> None:
    node = parse_node("NodeName=h2 Gres=gpu:8 CPUTot=40 ThreadsPerCore=2 RealMemory=80000 State=IDLE")
    limits = slurm_nodes.limits_of(parse_partition(f"PartitionName=p {partition}"), config)
    assert slurm_nodes.share_of(node, 1, limits) == share


def test_gpus_of_other_jobs_are_taken() -> None:
    jobs = [parse_job(line) for line in recorded("job").splitlines()]
    holders = slurm_nodes.holders_by_node(jobs, ours=[])["n1"]
    ours = {99: (3, 5)}
    taken = slurm_nodes.taken_gpus(N1, exact=True, ours=ours, held=[3, 5], holders=holders)
    assert sorted(taken) == [0, 1]
    assert taken[0].endswith("of root")
    nobody = slurm_nodes.holders_by_node(jobs, ours=[]).get("n4", [])
    assert [str(holder).split(" of ")[1] for holder in nobody] == ["nobody"]


def test_without_exact_ids_as_many_are_taken_as_others_have() -> None:
    # Slurm gave us 0 and 1 for what we call 6 and 7; somebody else has 2.
    taken = slurm_nodes.taken_gpus(PLAIN, exact=False, ours={9: (0, 1)}, held=[6, 7], holders=[])
    assert taken == {2: "another Slurm job"}
    # The one that Slurm gave away is one that we count as ours: another takes its place.
    taken = slurm_nodes.taken_gpus(PLAIN, exact=False, ours={9: (0, 1)}, held=[1, 2], holders=[])
    assert list(taken) == [7]


def test_states_of_nodes_in_words() -> None:
    facts = {node.name: slurm_nodes.facts_of(node, rack="r", taken={0: "x"}) for node in NODES}
    assert facts["n1"].alive
    assert facts["n1"].gpus[0].taken == "x"
    assert facts["n1"].gpus[0].virtual
    assert facts["n6"].alive
    assert facts["n6"].drained == "new disk = bad"
    assert not facts["n7"].alive
    assert facts["n7"].detail == "Slurm says DOWN: fan"
    assert facts["cpu1"].detail == "Slurm says DOWN+NOT_RESPONDING"


def test_nodes_of_one_rack_stand_together_in_their_natural_order() -> None:
    found = [parse_node(f"NodeName={name} State=IDLE Gres=gpu:1") for name in ("n10", "n2", "a1", "n1", "lone")]
    racks = {"n1": "r1", "n10": "r1", "n2": "r2", "a1": "r2"}
    assert [node.name for node in slurm_nodes.in_rack_order(found, racks)] == ["n1", "n10", "a1", "n2", "lone"]


def choose(partition: str = "", reservation: str = "", user: str = "nobody") -> list[str]:
    nodes, _ = slurm_nodes.choose_nodes(
        NODES, PARTITIONS, RESERVATIONS, partition=partition, reservation=reservation, user=user
    )
    return [node.name for node in nodes]


def test_which_nodes_are_ours() -> None:
    assert choose() == ["n1", "n2", "n4", "n6", "n7"]
    assert choose("main", "ours") == ["n7"]


@pytest.mark.parametrize(
    ("partition", "reservation", "user", "message", "hint"),
    [
        ("x", "", "a", "Slurm has no partition 'x'", "it has: main, cpu"),
        ("cpu", "", "a", "partition 'cpu' has no GPUs", "partitions with GPUs: main"),
        ("main", "r", "a", "Slurm has no reservation 'r'", "it has: ours"),
        ("main", "ours", "ann", "reservation 'ours' is for nobody, not for ann", "ask the administrator"),
        ("cpu", "ours", "nobody", "reservation 'ours' has no node of partition 'cpu'", "--partition"),
    ],
)
def test_a_wrong_choice_is_told(partition: str, reservation: str, user: str, message: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        choose(partition, reservation, user)
    assert caught.value.message == message
    assert hint in caught.value.hint
