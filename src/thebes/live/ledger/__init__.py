"""What the live scheduler knows, in the very arrays that policies see in the simulator, and how it changes.

The ledger changes only through `apply(entry)`, with entries that can be written down: so the journal of entries is the
ledger, a restarted controller gets its own back, and any decision can be made again from the journal (`replay`).
It does no I/O and has no clock; entries carry their time. The rules are those of every world (`thebes.model.rules`);
when a job began to run, how fast it runs and when it ended are told by entries instead of being computed ahead.
"""

from thebes.live.ledger.ledger import Ledger
from thebes.live.ledger.nodes import NodeSpec, cluster_of
from thebes.live.ledger.planning import Planned
from thebes.live.ledger.rows import UNTOLD
from thebes.live.ledger.snapshot import FORMAT

__all__ = ["FORMAT", "UNTOLD", "Ledger", "NodeSpec", "Planned", "cluster_of"]
