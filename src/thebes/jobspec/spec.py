"""The one definition of a job, which YAML files, the HTTP API and the Python client share.

Validation happens only here; `job_schema()` is the published JSON Schema.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

MAX_COMMAND_BYTES = 128 << 10
MAX_ENV_BYTES = 256 << 10
MAX_ARRAY = 10_000
NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
JOB_ID = r"^[1-9][0-9]{0,11}(_[0-9]{1,6})?$"
ENV_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
RESERVED_ENV = ("THEBES_",)

Word = Annotated[str, Field(min_length=1, max_length=MAX_COMMAND_BYTES)]


class JobSpec(BaseModel):
    """A training job: what to run, on how many GPUs, and how it may be treated."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    command: list[Word] = Field(min_length=1, max_length=4096, description="The program and its arguments.")
    gpus: int = Field(1, ge=1, le=100_000, description="GPUs in all; the job gets all of them or none.")
    min_gpus: int | None = Field(
        None, ge=1, le=100_000, description="Elastic: the fewest GPUs that it can run on; default: what it asks for."
    )
    max_gpus: int | None = Field(
        None, ge=1, le=100_000, description="Elastic: the most GPUs that it can use; default: what it asks for."
    )
    nodes: int | None = Field(None, ge=1, le=10_000, description="Spread evenly over exactly so many nodes.")
    gpu_type: str | None = Field(None, max_length=200, description="GPU types that will do, as in A100|H100.")
    name: str | None = Field(None, pattern=NAME, description="For people; need not be unique.")
    tenant: str | None = Field(None, pattern=NAME, description="On whose account; default: the user's own tenant.")
    priority: int = Field(0, ge=-1000, le=1000, description="Higher goes first, before the policy's own order.")
    time_s: float | None = Field(
        None, gt=0, le=1e9, description="Run time limit in seconds, all incarnations together."
    )
    after: list[Annotated[str, Field(pattern=JOB_ID)]] = Field(
        default_factory=list, max_length=1000, description="Start only when these jobs have completed."
    )
    after_any: list[Annotated[str, Field(pattern=JOB_ID)]] = Field(
        default_factory=list, max_length=1000, description="Start only when these jobs have ended, in whatever way."
    )
    array: list[Annotated[int, Field(ge=0, le=999_999)]] | None = Field(
        None, min_length=1, max_length=MAX_ARRAY, description="One job per index, which it finds in THEBES_ARRAY_INDEX."
    )
    array_limit: int | None = Field(
        None, ge=1, le=1_000_000, description="At most so many jobs of the array at a time."
    )
    hold: bool = Field(False, description="Held from the first moment on: it waits until it is released.")
    env: dict[str, str] = Field(default_factory=dict, max_length=1000, description="Environment of the job.")
    workdir: str | None = Field(None, max_length=4096, description="Absolute path; default: where it was submitted.")
    launcher: Literal["plain", "torchrun"] = Field("plain", description="plain: one process per GPU; or torchrun.")
    ranks_per_node: int | None = Field(
        None, ge=1, le=1024, description="plain: processes per node instead of one per GPU."
    )
    mechanism: Literal["auto", "checkpoint", "freeze", "cuda"] = Field("auto", description="How it may be suspended.")
    grace_s: float | None = Field(
        None, ge=0, le=86_400, description="Seconds between notice and kill; default: the cluster's."
    )
    max_retries: int = Field(
        0, ge=0, le=1000, description="Restarts after failures of its own; preemptions do not count."
    )
    progress_pattern: str | None = Field(
        None, max_length=1000, description="Regular expression with one group: the step in a log line."
    )
    pack: bool = Field(
        False, description="May share its GPU with another such job, as long as measured rates say it pays."
    )
    model: str | None = Field(None, max_length=200, description="Name of the model, for placement by tensor skew.")
    snapshot: str | None = Field(
        None, pattern=r"^[0-9a-f]{64}$", description="Set by the client: the work directory as uploaded."
    )

    @field_validator("command")
    @classmethod
    def _command_is_bounded(cls, command: list[str]) -> list[str]:
        if sum(len(word.encode()) for word in command) > MAX_COMMAND_BYTES:
            raise ValueError(f"the command is longer than {MAX_COMMAND_BYTES >> 10} KiB: put it into a script")
        if any("\0" in word for word in command):
            raise ValueError("the command contains a NUL character")
        return command

    @field_validator("env")
    @classmethod
    def _env_is_sane(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if not ENV_NAME.match(name):
                raise ValueError(f"'{name}' is not the name of an environment variable")
            if name.startswith(RESERVED_ENV):
                raise ValueError(f"{name}: names that begin with THEBES_ are set by Thebes")
            if "\0" in value:
                raise ValueError(f"the value of {name} contains a NUL character")
        if sum(len(k.encode()) + len(v.encode()) for k, v in env.items()) > MAX_ENV_BYTES:
            raise ValueError(f"the environment is larger than {MAX_ENV_BYTES >> 10} KiB")
        return env

    @field_validator("workdir")
    @classmethod
    def _workdir_is_absolute(cls, workdir: str | None) -> str | None:
        if workdir is not None and (not workdir.startswith("/") or "\0" in workdir):
            raise ValueError("the work directory must be an absolute path")
        return workdir

    @field_validator("progress_pattern")
    @classmethod
    def _pattern_compiles(cls, pattern: str | None) -> str | None:
        if pattern is not None:
            try:
                groups = re.compile(pattern).groups
            except re.error as error:
                raise ValueError(f"not a regular expression: {error}") from None
            if groups != 1:
                raise ValueError("the pattern needs exactly one group, the step number: as in 'step (\\d+)'")
        return pattern

    def model_post_init(self, context: Any) -> None:
        if self.nodes is not None and self.gpus % self.nodes:
            raise ValueError(f"{self.gpus} GPUs do not spread evenly over {self.nodes} nodes")
        if self.min_gpus is not None and self.min_gpus > self.gpus:
            raise ValueError(f"min_gpus is {self.min_gpus}, but the job asks for {self.gpus} GPUs: at most so many")
        if self.max_gpus is not None and self.max_gpus < self.gpus:
            raise ValueError(f"max_gpus is {self.max_gpus}, but the job asks for {self.gpus} GPUs: at least so many")
        if self.nodes is not None and (self.min_gpus or self.max_gpus):
            raise ValueError("nodes: an elastic job (min_gpus, max_gpus) cannot ask for a fixed number of nodes")
        if self.array_limit is not None and self.array is None:
            raise ValueError("array_limit: there is no array whose jobs it could limit")


def must_complete(after: Collection[str], job_id: str) -> bool:
    """Whether a job with this `after` needs `job_id` to complete; for other jobs that it comes after, any end will do.

    An array in `after` stands for all its members, so the kind of a dependency follows from the specification alone.
    """
    return job_id in after or job_id.partition("_")[0] in after


def job_schema() -> dict[str, Any]:
    """The JSON Schema of a job file, for editors and other languages."""
    schema = JobSpec.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "Thebes job"}
