"""Guaranteed GPUs per tenant, as users write them (`vcA=40,vcB=24`), read and checked in one way for all policies."""

from __future__ import annotations

from collections.abc import Collection

from thebes.model.cluster import Cluster
from thebes.model.errors import UserError, nearest
from thebes.model.parameters import named_numbers


def read_quotas(text: str, policy: str) -> dict[str, float]:
    """GPUs by the name of the tenant."""
    quotas = named_numbers(text, "quotas", policy)
    for name, quota in quotas.items():
        if quota < 0:
            raise UserError(f"{policy}: the quota of '{name}' is {quota:g}", hint="quotas are GPUs: 0 or more")
    return quotas


def check_names(named: Collection[str], what: str, policy: str, tenants: tuple[str, ...]) -> None:
    """Refuse names of tenants that have no jobs."""
    for name in named:
        if name not in tenants:
            raise UserError(f"{policy}: {what} name '{name}', which no job is of", hint=nearest(name, tenants))


def check_sum(quotas: dict[str, float], policy: str, cluster: Cluster, rest: str) -> None:
    """Refuse guarantees above what the cluster has; `rest` says what becomes of the rest if some are lowered."""
    promised = sum(quotas.values())
    if promised > cluster.total_gpus:
        raise UserError(
            f"{policy}: the quotas add up to {promised:g} GPUs, the cluster has {cluster.total_gpus}",
            hint=f"quotas are guaranteed: lower {rest}",
        )
