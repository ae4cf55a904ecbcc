"""Thebes: a GPU cluster scheduler for deep-learning training, and the simulator that runs the very same policies.

    import thebes
    result = thebes.simulate("jobs.csv", "8x8", "tiresias-l")

Names are loaded when first used, so that `thebes --help` does not wait for the simulator.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from thebes.client import AsyncClient, Client
    from thebes.model.cluster import Cluster
    from thebes.model.decision import Decision
    from thebes.model.errors import UserError
    from thebes.model.parameters import parameter
    from thebes.model.trace import Trace
    from thebes.model.view import View
    from thebes.policy.base import Policy
    from thebes.policy.fill import fill
    from thebes.policy.seating import place
    from thebes.report.result import Result
    from thebes.sim.costs import Costs
    from thebes.sim.simulate import simulate
    from thebes.trace import sample_path as sample_trace
    from thebes.trace.cluster_file import read_cluster
    from thebes.trace.reader import read as read_trace

_MODULE_OF = {
    "AsyncClient": "thebes.client",
    "Client": "thebes.client",
    "Cluster": "thebes.model.cluster",
    "Costs": "thebes.sim.costs",
    "Decision": "thebes.model.decision",
    "Policy": "thebes.policy.base",
    "Result": "thebes.report.result",
    "Trace": "thebes.model.trace",
    "UserError": "thebes.model.errors",
    "View": "thebes.model.view",
    "fill": "thebes.policy.fill",
    "parameter": "thebes.model.parameters",
    "place": "thebes.policy.seating",
    "read_cluster": "thebes.trace.cluster_file",
    "simulate": "thebes.sim.simulate",
}
_RENAMED = {"read_trace": ("thebes.trace.reader", "read"), "sample_trace": ("thebes.trace", "sample_path")}

__all__ = [
    "AsyncClient",
    "Client",
    "Cluster",
    "Costs",
    "Decision",
    "Policy",
    "Result",
    "Trace",
    "UserError",
    "View",
    "fill",
    "parameter",
    "place",
    "read_cluster",
    "read_trace",
    "sample_trace",
    "simulate",
]


def __getattr__(name: str) -> Any:
    module, attribute = _RENAMED.get(name) or (_MODULE_OF.get(name), name)
    if module is None:
        raise AttributeError(f"module 'thebes' has no attribute '{name}'")
    value = globals()[name] = getattr(import_module(module), attribute)
    return value
