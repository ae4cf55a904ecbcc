"""The process that forks controllers has loaded all that they need, for either database; a fork then takes moments."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from thebes.live.config import Config, save
from thebes.protocol.instance import Instance

# Loads as the process does, then imports what a controller imports to serve: what was missing, and how many threads.
LOADS = """
import json, sys, threading
from pathlib import Path
from thebes.instance import standby
from thebes.protocol.instance import Instance

instance = Instance(Path(sys.argv[1]))
standby.load(instance)
before, threads = set(sys.modules), threading.active_count()
import thebes.instance.main, thebes.api.app, thebes.live.controller, thebes.live.engines, thebes.store
from thebes.live.config import live_policy, load
from thebes.store.database import database_at

config = load(instance.config)
if config.store:
    import thebes.instance.shift
database_at(config.store or instance.store).reader_engine()
live_policy(config)
print(json.dumps({"missing": sorted(set(sys.modules) - before), "threads": threads, "loaded": sorted(before)}))
"""


@pytest.mark.parametrize("store", ["", "postgresql://nobody@127.0.0.1:1/none"], ids=["sqlite", "postgres"])
def test_nothing_is_left_to_import_after_a_fork(store: str, tmp_path: Path):
    instance = Instance(tmp_path / "i")
    instance.create()
    nodes = [{"name": "n0", "gpus": 2, "virtual": True}]
    save(instance.config, Config(nodes=nodes, policy="dally", store=store))  # type: ignore[arg-type]
    ran = subprocess.run([sys.executable, "-c", LOADS, str(instance.dir)], capture_output=True, text=True, check=True)
    told = json.loads(ran.stdout)
    assert told["missing"] == []
    wanted = {"thebes.live.controller", "thebes.api.app", "fastapi", "thebes.policy.dally.dally", "thebes.engine.local"}
    wanted |= {"thebes.instance.shift", "psycopg", "sqlalchemy.dialects.postgresql"} if store else {"sqlite3"}
    assert wanted <= set(told["loaded"])
    assert told["threads"] == 1  # a process that forks should have no others of its own
