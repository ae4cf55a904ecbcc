"""The speed model `plans`: jobs have a fixed global batch, and each runs under its own execution plan.

Under this model a scheduler can change the plan of a job while it runs; a policy that knows nothing of plans runs every
job under the plan that its user asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from thebes.model.cluster import Cluster
from thebes.model.errors import UserError, nearest
from thebes.model.parameters import parameter
from thebes.perf.base import Gang, SpeedModel, Times
from thebes.perf.models import GANGS, Model, assign_by_gang
from thebes.perf.plans.book import PlanBook
from thebes.perf.plans.profiles import PlanProfiles
from thebes.perf.plans.site import CPUS_PER_GPU, site_of
from thebes.perf.plans.transformer import Transformer, catalogue, from_toml

TRUTHS = ("measured", "model")
# What a job of a trace without models trains: large models need many GPUs, and small ones cannot use them.
_BY_GANG: Mapping[str, tuple[str, ...]] = {
    "1": ("vit", "roberta-large", "bert-large"),
    "2-4": ("vit", "roberta-large", "bert-large", "t5", "gpt-2"),
    "5-8": ("roberta-large", "bert-large", "t5", "gpt-2", "llama-2-7b"),
    "9+": ("llama-2-7b",),
}
assert tuple(_BY_GANG) == GANGS


@dataclass(frozen=True)
class Plans(SpeedModel):
    """Transformers with a fixed global batch under any execution plan (data, tensor, pipeline parallel, ZeRO, offload).

    Times come from Rubick's model, fitted to measurements on A800 GPUs, or from the measurements themselves where the
    plan and the placement are among them. Trace columns: plan, cpus, global_batch, guaranteed, plans (all optional).
    """

    name: ClassVar[str] = "plans"

    truth: str = parameter("measured", "measured: as measured, where a plan was; model: always by the fitted model")
    models_file: str = parameter("", "TOML files with models of your own, separated by commas (docs/plans.md)")

    def __post_init__(self) -> None:
        if self.truth not in TRUTHS:
            raise UserError(f"unknown perf.truth '{self.truth}'", hint=nearest(self.truth, TRUTHS))

    @cached_property
    def transformers(self) -> Mapping[str, Transformer]:
        """The models that can be trained, by every name that they have."""
        files = [Path(name.strip()) for name in self.models_file.split(",") if name.strip()]
        for path in files:
            if path.suffix != ".toml":
                raise UserError(
                    f"perf.models_file: {path} is no .toml file",
                    hint='a .toml with config = "config.json" and global_batch = 8 takes its shape from a config.json',
                )
        own = [from_toml(path) for path in files]
        return dict(catalogue()) | {model.name: model for model in own}

    def models(self) -> Mapping[str, Model]:
        return {name: facts_of(model, name) for name, model in self.transformers.items()}

    def knows(self, model: str) -> bool:
        return model in self.transformers

    def assign(self, gpus: NDArray[np.int64], seed: int) -> list[str]:
        return assign_by_gang(gpus, seed, _BY_GANG)

    def check(self, cluster: Cluster) -> None:
        if len(cluster.kinds) > 1:
            raise UserError(
                f"{cluster.name}: performance model plans takes clusters of one kind of node, not {cluster.describe()}",
                hint="leave one kind, or use --perf network",
            )
        kind = next(iter(cluster.kinds))
        if kind.cpus is not None and kind.cpus < kind.gpus:
            raise UserError(
                f"{cluster.name}: cpus = {kind.cpus} for {kind.gpus} GPUs of a node: every GPU needs one under plans",
                hint=f"write cpus = {kind.gpus} or more, or leave it out for {CPUS_PER_GPU * kind.gpus}",
            )

    def times(self, gang: Gang) -> Times:
        """The times under the best plan for so many GPUs on as few nodes as possible."""
        cluster, gpus = gang.cluster, gang.gpus
        site = site_of(cluster, gang.kind)
        book = PlanBook((self.transformers[gang.model or _BY_GANG["1"][0]],), site)
        cpus = max(1, site.node_cpus // site.node_gpus)
        best = book.best(0, gpus, -(-gpus // site.node_gpus), cpus)
        if best is None:
            raise UserError(
                f"no execution plan of {book.models[0].name} uses {gpus} GPUs",
                hint=f"`thebes plan {book.models[0].name}` lists the numbers that can be used",
            )
        return PlanProfiles(book, cluster, as_measured=self.truth == "measured").times(0, best.plan, cpus, gpus)


def facts_of(model: Transformer, name: str) -> Model:
    """The facts about a model that the rest of the simulator needs."""
    return Model(name, parameters=model.parameters)
