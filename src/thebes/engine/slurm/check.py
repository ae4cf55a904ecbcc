"""`thebes engine check slurm`: what a site supports, what is lost where it does not, and what to do about it.

It looks at what Slurm tells, and then runs one short step on one node, to see whether nodes have our Python, see the
shared folder, and can call this machine.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from thebes.engine.finding import SiteFinding
from thebes.engine.slurm import nodes as slurm_nodes
from thebes.engine.slurm.client import Slurm
from thebes.engine.slurm.commands import SlurmError, SlurmTerms
from thebes.engine.slurm.records import NodeRecord, Partition, seconds_of
from thebes.model.errors import UserError

OLDEST = (21, 8)
PROBE_S = 30
SKEW_S = 2.0
_PROBE = """
import json, os, socket, sys, time
found = {"time": time.time(), "node": os.environ.get("SLURMD_NODENAME", ""), "version": sys.version_info[:2]}
try:
    with open(sys.argv[1]) as file:
        found["shared"] = file.read() == sys.argv[2]
except OSError as error:
    found["shared"] = False
    found["why"] = str(error)
try:
    socket.create_connection((sys.argv[3], int(sys.argv[4])), 5).close()
    found["home"] = True
except OSError as error:
    found["home"] = False
    found["home_why"] = str(error)
print(json.dumps(found))
"""


def check(terms: SlurmTerms, *, shared: Path | None = None, home: str = "") -> list[SiteFinding]:
    """All there is to say; the first problem that hides the rest is the last."""
    return asyncio.run(look(Slurm(), terms, shared=shared, home=home))


async def look(slurm: Slurm, terms: SlurmTerms, *, shared: Path | None = None, home: str = "") -> list[SiteFinding]:
    try:
        config, records, partitions, reservations, racks = await asyncio.gather(
            slurm.config(), slurm.nodes(), slurm.partitions(), slurm.reservations(), slurm.racks()
        )
        nodes, used = slurm_nodes.choose_nodes(
            records,
            partitions,
            reservations,
            partition=terms.partition,
            reservation=terms.reservation,
            user=slurm_nodes.user_name(),
        )
    except SlurmError as error:
        told = slurm_nodes.explain(error)
        return [SiteFinding("problem", "Slurm", told.message, told.hint)]
    except UserError as error:
        return [SiteFinding("problem", "partition", error.message, error.hint)]
    found = [*site_findings(config, nodes, used, racks), *limit_findings(config, used)]
    found += await _try_a_node(slurm, nodes, terms, shared or Path.cwd(), home)
    return found


def site_findings(
    config: dict[str, str], nodes: Sequence[NodeRecord], partition: Partition, racks: dict[str, str]
) -> list[SiteFinding]:
    """What Slurm tells of the site."""
    version = config.get("SLURM_VERSION", "")
    numbers = tuple(int(word) for word in version.split(".")[:2] if word.isdigit())
    found = [SiteFinding("ok", "Slurm", f"version {version}, cluster {config.get('ClusterName', '?')}")]
    if numbers < OLDEST:
        found = [
            SiteFinding("warning", "Slurm", f"version {version} is older than any we have tried", "use 21.08 or newer")
        ]
    gpus = sum(len(slurm_nodes.kinds_of(node)) for node in nodes)
    facts = [slurm_nodes.facts_of(node, rack="", taken={}) for node in nodes]
    away = [one for one in facts if not one.alive or one.drained]
    found.append(SiteFinding("ok", "partition", f"{partition.name}: {len(nodes)} nodes with {gpus} GPUs"))
    if away:
        names = ", ".join(f"{one.name} ({one.detail or one.drained})" for one in away[:5])
        found.append(SiteFinding("warning", "nodes", f"{len(away)} not in use: {names}", "`sinfo -R` tells why"))
    match slurm_nodes.mode_of(nodes, partition, config):
        case "exact":
            found.append(
                SiteFinding("ok", "GPU ids", "each GPU has a gres type of its own: jobs get exactly the ones decided")
            )
        case "counts":
            found.append(
                SiteFinding(
                    "warning",
                    "GPU ids",
                    "only counts can be asked for: Slurm chooses which GPUs of a node a job gets. Nothing is lost "
                    "where the GPUs of a node are alike; placement by links between them is Slurm's",
                    "give each GPU a type of its own: Gres=gpu:g0:1,gpu:g1:1,… and one line each in gres.conf",
                )
            )
        case "whole":
            found.append(
                SiteFinding(
                    "warning",
                    "GPU ids",
                    "Slurm gives whole nodes only: a job that needs fewer GPUs keeps the rest of its nodes empty",
                    "use a partition without OverSubscribe=EXCLUSIVE, and select/cons_tres",
                )
            )
    kinds = sorted({one.name for fact in facts for one in fact.gpus if one.name})
    found.append(SiteFinding("ok", "GPU types", ", ".join(kinds) or "not told: every GPU suits every job"))
    known = {racks[node.name] for node in nodes if node.name in racks}
    if known:
        found.append(SiteFinding("ok", "topology", f"{len(known)} leaf switches: they are the racks"))
    else:
        hint = "an administrator can set TopologyPlugin=topology/tree and topology.conf"
        found.append(SiteFinding("warning", "topology", "Slurm knows no switches: all nodes count as one rack", hint))
    return found


def limit_findings(config: dict[str, str], partition: Partition) -> list[SiteFinding]:
    """What the site does to jobs by itself."""
    found: list[SiteFinding] = []
    limit_s = seconds_of(partition.max_time)
    kill_wait_s = seconds_of(config.get("KillWait", "")) or 30.0
    if limit_s is None:
        found.append(SiteFinding("ok", "time limit", "none"))
    else:
        found.append(
            SiteFinding(
                "warning",
                "time limit",
                f"Slurm ends a job after {partition.max_time}: it is asked to save within {0.8 * kill_wait_s:g} s, "
                "and goes on in a new Slurm job",
                "a partition with MaxTime=INFINITE, or a longer KillWait",
            )
        )
    preempts = config.get("PreemptType", "preempt/none") != "preempt/none" and partition.preempt_mode != "OFF"
    if preempts:
        found.append(
            SiteFinding(
                "warning",
                "preemption",
                f"the site may preempt our jobs ({partition.preempt_mode}): they are asked to save and go back in line",
                "a partition of the highest PriorityTier, or a reservation",
            )
        )
    else:
        found.append(SiteFinding("ok", "preemption", "the site does not preempt in this partition"))
    if config.get("AccountingStorageType", "").endswith("none"):
        found.append(SiteFinding("ok", "accounting", "off: nothing of Thebes needs it"))
    else:
        found.append(SiteFinding("ok", "accounting", "on: one Slurm job per start of a Thebes job, named thebes-…"))
    interval = next(
        (
            word.partition("=")[2]
            for word in config.get("SchedulerParameters", "").split(",")
            if word.startswith("bf_interval=")
        ),
        "30",
    )
    if not interval.isdigit() or int(interval) > 5:
        found.append(
            SiteFinding(
                "warning",
                "uneven gangs",
                f"jobs that take different GPUs on different nodes start only every {interval} s, when Slurm's "
                "backfill scheduler comes round",
                "SchedulerParameters=bf_interval=1, or jobs of whole nodes",
            )
        )
    return found


async def _try_a_node(
    slurm: Slurm, nodes: Sequence[NodeRecord], terms: SlurmTerms, shared: Path, home: str
) -> list[SiteFinding]:
    """One short step on one node."""
    usable = [node for node in nodes if slurm_nodes.facts_of(node, rack="", taken={}).alive]
    if not usable:
        return [SiteFinding("problem", "nodes", "none of the nodes is up", "`sinfo -R` tells why")]
    word = secrets.token_hex(8)
    mark = shared / f".thebes-check-{word}"
    door = socket.create_server(("", 0))
    try:
        mark.write_text(word)
        host = home or socket.getfqdn()
        args = ["srun", "--quiet", "--nodes=1", "--ntasks=1", f"--immediate={PROBE_S}", "--mpi=none", "--input=none"]
        args += ["--time=1", "--job-name=thebes-check", *terms.args()]
        probe = [str(mark), word, host, str(door.getsockname()[1])]
        asked_s = time.time()
        command = [*args, sys.executable, "-I", "-S", "-c", _PROBE, *probe]
        text = await slurm.try_step(command, name="thebes-check", wait_s=PROBE_S)
        return probe_findings(json.loads(text), shared, host, asked_s, time.time())
    except SlurmError as error:
        return [trial_failure(error)]
    except (OSError, ValueError) as error:
        return [
            SiteFinding(
                "problem", "shared folder", f"{shared}: {error}", "name one with --shared that you can write to"
            )
        ]
    finally:
        door.close()
        with suppress(OSError):
            mark.unlink()


def trial_failure(error: SlurmError) -> SiteFinding:
    """A step that could not be run on any node."""
    if "execve" in error.message or "No such file" in error.message:
        hint = "install Thebes into a folder that all nodes see"
        return SiteFinding("problem", "Python", f"a node cannot run {sys.executable} ({error.message})", hint)
    if error.trouble == "account" or re.search(r"Account|QOS|Assoc", error.message):
        hint = "name one of yours with --account and --qos: `sacctmgr show assoc user=$USER` lists them"
        return SiteFinding("problem", "account", f"Slurm takes no jobs from us ({error.message})", hint)
    hint = "no free node? then nothing could be tried on one; else look at the message"
    return SiteFinding("warning", "trial step", f"a step could not be run: {error.message}", hint)


def probe_findings(told: dict[str, object], shared: Path, host: str, asked_s: float, now_s: float) -> list[SiteFinding]:
    """What the step on a node has seen."""
    node = told.get("node") or "a node"
    found = [SiteFinding("ok", "Python", f"{node} runs {sys.executable}")]
    if told.get("shared"):
        found.append(SiteFinding("ok", "shared folder", f"{node} sees {shared}"))
    else:
        why = told.get("why") or "another file is there"
        hint = "name a folder on a shared file system with --shared, here and for `thebes up`"
        found.append(SiteFinding("problem", "shared folder", f"{node} does not see {shared} ({why})", hint))
    if told.get("home"):
        found.append(SiteFinding("ok", "calling home", f"{node} reaches {host}"))
    else:
        hint = "name an address of this machine that nodes reach with --home; a firewall may be in the way"
        found.append(
            SiteFinding("problem", "calling home", f"{node} cannot reach {host} ({told.get('home_why')})", hint)
        )
    there_s = float(str(told.get("time") or now_s))
    skew_s = max(asked_s - there_s, there_s - now_s, 0.0)
    if skew_s > SKEW_S:
        hint = "nothing of Thebes depends on it, but munge and your logs do: use NTP"
        found.append(SiteFinding("warning", "clocks", f"{node} is {skew_s:.0f} s off", hint))
    else:
        found.append(SiteFinding("ok", "clocks", "agree"))
    return found
