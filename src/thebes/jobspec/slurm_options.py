"""An option of a Slurm command as we take it, and those of sbatch: for its command line and for #SBATCH lines alike."""

from __future__ import annotations

from dataclasses import dataclass

NONE, NEEDED, MAYBE = "", "=", "?"  # whether an option takes a value


@dataclass(frozen=True)
class Option:
    """One option. `unsupported` says why it stops the command; `unused` that it changes nothing here."""

    short: str = ""
    takes: str = NONE
    unused: bool = False
    unsupported: str = ""


GPUS_ONLY = "Thebes gives out GPUs"
PLACES = "the policy decides which nodes a job gets"
ONE = "it is one cluster"
UNUSED = Option("", NEEDED, unused=True)

OPTIONS = {
    # understood
    "account": Option("A", NEEDED),
    "array": Option("a", NEEDED),
    "chdir": Option("D", NEEDED),
    "dependency": Option("d", NEEDED),
    "error": Option("e", NEEDED),
    "export": Option("", NEEDED),
    "gpus": Option("G", NEEDED),
    "gpus-per-node": Option("", NEEDED),
    "gpus-per-task": Option("", NEEDED),
    "gres": Option("", NEEDED),
    "help": Option("h"),
    "hold": Option("H"),
    "input": Option("i", NEEDED),
    "job-name": Option("J", NEEDED),
    "nodes": Option("N", NEEDED),
    "ntasks": Option("n", NEEDED),
    "ntasks-per-node": Option("", NEEDED),
    "open-mode": Option("", NEEDED),
    "output": Option("o", NEEDED),
    "parsable": Option(),
    "quiet": Option("Q"),
    "requeue": Option(),
    "signal": Option("", NEEDED),
    "test-only": Option(),
    "time": Option("t", NEEDED),
    "usage": Option(),
    "version": Option("V"),
    "wait": Option("W"),
    "wrap": Option("", NEEDED),
    # These change nothing here: shares of a node's CPU and memory, addresses for mail, the choice of a queue.
    "acctg-freq": UNUSED,
    "comment": UNUSED,
    "cores-per-socket": UNUSED,
    "cpus-per-gpu": UNUSED,
    "cpus-per-task": Option("c", NEEDED, unused=True),
    "export-file": Option("", NEEDED, unsupported="use --export"),
    "extra": UNUSED,
    "extra-node-info": Option("B", NEEDED, unused=True),
    "gpu-bind": UNUSED,
    "hint": UNUSED,
    "kill-on-invalid-dep": UNUSED,
    "mail-type": UNUSED,
    "mail-user": UNUSED,
    "mem": UNUSED,
    "mem-bind": UNUSED,
    "mem-per-cpu": UNUSED,
    "mem-per-gpu": UNUSED,
    "mincpus": UNUSED,
    "nice": Option("", MAYBE, unused=True),
    "ntasks-per-core": UNUSED,
    "ntasks-per-gpu": Option("", NEEDED, unsupported="a script runs once on each node; start ranks with torchrun"),
    "ntasks-per-socket": UNUSED,
    "partition": Option("p", NEEDED, unused=True),
    "priority": UNUSED,
    "profile": UNUSED,
    "propagate": Option("", MAYBE, unused=True),
    "qos": Option("q", NEEDED, unused=True),
    "sockets-per-node": UNUSED,
    "threads-per-core": UNUSED,
    "tmp": UNUSED,
    "verbose": Option("v", unused=True),
    "wait-all-nodes": UNUSED,
    "wckey": UNUSED,
    # would change what runs, where or when
    "batch": Option("", NEEDED, unsupported=PLACES),
    "bb": Option("", NEEDED, unsupported="there are no burst buffers"),
    "bbf": Option("", NEEDED, unsupported="there are no burst buffers"),
    "begin": Option("b", NEEDED, unsupported="submit it when it may run, or make it depend on a job"),
    "cluster-constraint": Option("", NEEDED, unsupported=ONE),
    "clusters": Option("M", NEEDED, unsupported=ONE),
    "constraint": Option("C", NEEDED, unsupported="name a GPU type: --gres=gpu:TYPE:N"),
    "container": Option("", NEEDED, unsupported="start the container in the script"),
    "contiguous": Option("", unsupported=PLACES),
    "core-spec": Option("S", NEEDED, unsupported=GPUS_ONLY),
    "cpu-freq": Option("", NEEDED, unsupported=GPUS_ONLY),
    "deadline": Option("", NEEDED, unsupported="use --time"),
    "delay-boot": Option("", NEEDED, unsupported="nodes are not booted"),
    "distribution": Option("m", NEEDED, unsupported="ranks follow the topology"),
    "exclude": Option("x", NEEDED, unsupported=PLACES),
    "exclusive": Option("", MAYBE, unsupported="GPUs are always a job's own; for whole nodes ask for all their GPUs"),
    "get-user-env": Option("", MAYBE, unsupported="use --export"),
    "gid": Option("", NEEDED, unsupported="a job runs as who submits it"),
    "gpu-freq": Option("", NEEDED, unsupported="GPUs run at their own speed"),
    "gpus-per-socket": Option("", NEEDED, unsupported="use --gpus-per-node"),
    "ignore-pbs": Option("", unused=True),
    "licenses": Option("L", NEEDED, unsupported="there are no licenses"),
    "network": Option("", NEEDED, unsupported=PLACES),
    "no-kill": Option("k", MAYBE, unsupported="a job that loses a node is started again"),
    "no-requeue": Option("", unsupported="a job may be preempted and is then started again"),
    "nodefile": Option("F", NEEDED, unsupported=PLACES),
    "nodelist": Option("w", NEEDED, unsupported=PLACES),
    "overcommit": Option("O", unsupported=GPUS_ONLY),
    "oversubscribe": Option("s", unsupported="`thebes submit --pack` lets jobs share a GPU"),
    "power": Option("", NEEDED, unsupported="power is not managed"),
    "prefer": Option("", NEEDED, unsupported=PLACES),
    "reboot": Option("", unsupported="nodes are not booted"),
    "reservation": Option("", NEEDED, unsupported="there are no reservations"),
    "spread-job": Option("", unsupported=PLACES),
    "switches": Option("", NEEDED, unsupported=PLACES),
    "thread-spec": Option("", NEEDED, unsupported=GPUS_ONLY),
    "time-min": Option("", NEEDED, unsupported="use --time"),
    "tres-per-task": Option("", NEEDED, unsupported="use --gpus-per-task"),
    "uid": Option("", NEEDED, unsupported="a job runs as who submits it"),
    "use-min-nodes": Option("", unused=True),
}
GPU_OPTIONS = ("gpus", "gpus-per-node", "gres", "gpus-per-task")  # where a script has several, the first one counts
LONG_NAMES = {option.short: name for name, option in OPTIONS.items() if option.short}


def takes_next_word(name: str) -> bool:
    """Whether the word after the option is its value: of an option that nobody knows, too."""
    return name not in OPTIONS or OPTIONS[name].takes == NEEDED
