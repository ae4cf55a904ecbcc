"""The child process of the controller that speaks to Ray: `python -m thebes.engine.ray.driver`.

Ray's library ends the process it is in when it is at a loss (a head restarted without its state); so it is loaded here
and nowhere else. One JSON object per line. The first line on stdin says what is wanted; after it come requests:

    {"id", "op": "homes", "homes"}  → {"id", "result"}    where agents call, now that it is known; actors come after it
    {"id", "op": "retire"}          → {"id", "result"}    the cluster is taken down
    {"id", "op": "check", …}        → {"id", "result"}    for `thebes engine check ray`: see `probe`

Unasked it tells our own address in Ray, {"push": "here", "address"}, and twice a second the table of nodes, {"push":
"nodes", "nodes": [...]}. When the cluster cannot be joined it says {"push": "error", "message", "hint"} and ends.
At the end of stdin it ends; actors go on.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from thebes.engine.ray import code as ray_code
from thebes.engine.ray.code import node_folder, unpack
from thebes.engine.ray.session import NAMESPACE, join, load_ray
from thebes.model.errors import UserError

LOOK_EVERY_S = 0.5
ACTOR_S = 60.0  # until a new actor answers
PROBE_S = 30.0
AGAIN_S = 2.0
EXIT_REFUSED = 2


class Bootstrap:
    """The actor. It travels by value and loads our code only when it knows which: see thebes.node.ray_agent."""

    def __init__(self, instance_id: str, node: str) -> None:
        self.instance_id = instance_id
        self.folder = node_folder() / instance_id / node
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.keeper: Any = None
        self.code = ""
        import ray

        if ray.get_runtime_context().was_current_actor_reconstructed:  # the worker has died: go on at once
            spec = self._kept()
            if spec is not None and (Path(spec["path"]) / "thebes").is_dir():
                self._load(spec)

    def configure(self, code: tuple[str, bytes], spec: dict[str, Any]) -> dict[str, Any]:
        path = str(unpack(*code))
        spec = {**spec, "code": code[0], "path": path}
        draft = self.folder / f".spec.{os.getpid()}"
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            json.dump(spec, file)
        draft.replace(self.folder / "spec.json")
        if self.code and self.code != code[0]:
            os._exit(1)  # Ray starts this actor again, and that one loads the new code
        (self.folder / "run" / "gone").unlink(missing_ok=True)  # we are wanted again
        keeper = self.keeper or self._load(spec)
        keeper.configure(spec)
        return keeper.look()

    def look(self) -> dict[str, Any] | None:
        return None if self.keeper is None else self.keeper.look()

    def retire(self) -> None:
        if self.keeper is not None:
            self.keeper.retire()

    def _kept(self) -> dict[str, Any] | None:
        try:
            return json.loads((self.folder / "spec.json").read_bytes())
        except (OSError, ValueError):
            return None

    def _load(self, spec: dict[str, Any]) -> Any:
        import ray

        own_id = ray.get_runtime_context().get_node_id()

        def alive() -> bool:
            return any(one["NodeID"] == own_id and one["Alive"] for one in ray.nodes())

        def done() -> None:
            from ray.util.placement_group import get_placement_group, placement_group_table, remove_placement_group

            for found in placement_group_table().values():
                if found["name"].startswith(group_name(self.instance_id, own_id)) and found["state"] != "REMOVED":
                    remove_placement_group(get_placement_group(found["name"]))
            ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

        sys.path.insert(0, spec["path"])
        from thebes.node.ray_agent import NodeKeeper

        self.code = spec["code"]
        self.keeper = NodeKeeper(self.folder, spec, alive, done)
        return self.keeper


def group_name(instance_id: str, node_id: str) -> str:
    """How the names of placement groups begin that hold a node's GPUs for us."""
    return f"thebes-{instance_id}-{node_id[:8]}-gpus"


def gpus_of(node: Mapping[str, Any]) -> int:
    return int(node["Resources"].get("GPU", 0))


def entry(node: Mapping[str, Any]) -> dict[str, Any]:
    """What the engine is told of a node."""
    labels = {str(key): str(value) for key, value in (node.get("Labels") or {}).items()}
    kinds = [name.partition(":")[2] for name in node["Resources"] if name.startswith("accelerator_type:")]
    return {
        "id": node["NodeID"],
        "address": node["NodeManagerAddress"],
        "host": node.get("NodeManagerHostname", ""),
        "gpus": gpus_of(node),
        "gpu_type": kinds[0] if kinds else "",
        "labels": labels,
        "head": "node:__internal_head__" in node["Resources"],
        "alive": bool(node["Alive"]),
        "why": node.get("DeathReasonMessage", ""),
    }


class Tended:
    """What the driver does on one node: the actor, and the GPUs that it reserves."""

    def __init__(self, name: str, node_id: str, gpus: int, virtual: bool) -> None:
        self.name, self.node_id, self.gpus, self.virtual = name, node_id, gpus, virtual
        self.actor: Any = None
        self.asked: Any = None  # a call under way
        self.asked_s = 0.0
        self.not_before_s = 0.0
        self.ready = False
        self.trouble = ""
        self.said: dict[str, Any] = {}
        self.ids: dict[str, list[int]] = {}  # GPUs by the placement group that holds them for us
        self.probing: dict[str, Any] = {}
        self.taken: list[int] = []


class RayDriver:
    """One connection to Ray, for one engine."""

    def __init__(self, ray: Any, wanted: dict[str, Any], words: TextIO) -> None:
        self.ray = ray
        self.words = words
        self.wanted = wanted
        self.prefix = f"thebes-{wanted['instance']}"
        self.tended: dict[str, Tended] = {}
        self.code: Any = None
        self.retired = False
        self.out = threading.Lock()
        self.busy = threading.Lock()  # one thread talks to Ray at a time
        for module in (sys.modules[__name__], ray_code):
            ray.cloudpickle.register_pickle_by_value(module)

    def say(self, message: Mapping[str, Any]) -> None:
        line = json.dumps(message) + "\n"
        with self.out:
            self.words.write(line)
            self.words.flush()

    # The loop --------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        while True:
            with self.busy:
                nodes = self.ray.nodes()
                if self.wanted.get("names") and self.wanted.get("homes") and not self.retired:
                    self.tend(nodes)
                told = [{**entry(one), **self.care_of(one)} for one in nodes]
            self.say({"push": "nodes", "nodes": told})
            time.sleep(LOOK_EVERY_S)

    def care_of(self, node: Mapping[str, Any]) -> dict[str, Any]:
        found = self.tended.get(node["NodeID"])
        if found is None:
            return {}
        return {"trouble": found.trouble, "taken": found.taken, "agent": found.said.get("pid")}

    def tend(self, nodes: Iterable[Mapping[str, Any]]) -> None:
        """Every node that is wanted and alive has its actor and, as far as they are free, its GPUs reserved."""
        from thebes.engine.ray.nodes import name_of

        free, groups = self._available(), self._groups()
        living: set[str] = set()
        for one in nodes:
            found = entry(one)
            name = name_of(found)
            if not found["alive"] or name not in self.wanted["names"]:
                continue
            living.add(found["id"])
            if found["id"] not in self.tended:
                gpus = self.wanted["names"][name]
                self.tended[found["id"]] = Tended(name, found["id"], gpus, not found["gpu_type"])
            tended = self.tended[found["id"]]
            self._tend_actor(tended)
            if self.wanted.get("reserve", True):
                try:
                    self._tend_gpus(tended, groups, free.get(found["id"], {}), found["gpus"])
                except self.ray.exceptions.RayError as error:
                    tended.trouble = f"its GPUs cannot be reserved: {_first_line(error)}"
        for node_id in set(self.tended) - living:
            del self.tended[node_id]
        ours = tuple(group_name(self.wanted["instance"], node_id) for node_id in living)
        self._remove(name for name in groups if not name.startswith(ours))  # of nodes that are gone

    def _tend_actor(self, tended: Tended) -> None:
        now_s = time.monotonic()
        if tended.asked is not None:
            done, _ = self.ray.wait([tended.asked], timeout=0)
            if not done:
                if now_s - tended.asked_s > ACTOR_S:
                    tended.trouble = f"its actor has not answered for {ACTOR_S:g} s"
                    tended.asked, tended.ready = None, False
                return
            asked, tended.asked = tended.asked, None
            try:
                tended.said = self.ray.get(asked) or {}
            except self.ray.exceptions.RayError as error:
                tended.trouble = f"its actor does not run: {_first_line(error)}"
                tended.ready, tended.actor = False, None
                tended.not_before_s = now_s + AGAIN_S
                return
            tended.ready = bool(tended.said)  # an actor that was started anew may not know what it is for
            tended.trouble = tended.said.get("trouble", "")
            tended.not_before_s = now_s + AGAIN_S
            return
        if now_s < tended.not_before_s:
            return
        if tended.actor is None:
            tended.actor = self._actor(tended)
        tended.asked_s = now_s
        tended.asked = tended.actor.look.remote() if tended.ready else self._configure(tended)

    def _configure(self, tended: Tended) -> Any:
        if self.code is None:
            self.code = self.ray.put(ray_code.package())
        spec = {
            "node": tended.name,
            "gpus": tended.gpus,
            "virtual": tended.virtual,
            "python": "",
            **{key: self.wanted[key] for key in ("homes", "key", "lease_s", "alone_s")},
        }
        return tended.actor.configure.remote(self.code, spec)

    def _actor(self, tended: Tended) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        made = self.ray.remote(Bootstrap).options(
            name=f"{self.prefix}-{tended.name}-{tended.node_id[:8]}",
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            num_gpus=0,
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=4,
            scheduling_strategy=NodeAffinitySchedulingStrategy(tended.node_id, soft=False),
        )
        return made.remote(self.wanted["instance"], tended.name)

    # GPUs ------------------------------------------------------------------------------------------------------------

    def _available(self) -> dict[str, Any]:
        state = sys.modules["ray._private.state"]
        return state.available_resources_per_node()

    def _groups(self) -> dict[str, dict[str, Any]]:
        """Placement groups of ours, by name."""
        from ray.util.placement_group import placement_group_table

        found = {one["name"]: one for one in placement_group_table().values() if one["state"] != "REMOVED"}
        return {name: one for name, one in found.items() if name.startswith(f"{self.prefix}-")}

    def _remove(self, names: Iterable[str]) -> None:
        from ray.util.placement_group import get_placement_group, remove_placement_group

        for name in names:
            with suppress(ValueError):
                remove_placement_group(get_placement_group(name))

    def _tend_gpus(
        self, tended: Tended, known: Mapping[str, dict[str, Any]], free: Mapping[str, float], total: int
    ) -> None:
        """Ray's own scheduler keeps off what a placement group of ours holds; others' GPUs are told as taken."""
        from ray.util.placement_group import placement_group

        prefix = group_name(self.wanted["instance"], tended.node_id)
        groups = {name: one for name, one in known.items() if name.startswith(prefix)}
        held = {name: int(sum(b.get("GPU", 0) for b in found["bundles"].values())) for name, found in groups.items()}
        if any(found["state"] != "CREATED" for found in groups.values()):
            return
        tended.ids = {name: ids for name, ids in tended.ids.items() if name in groups}
        spare = int(free.get("GPU", 0))
        if spare and sum(held.values()) + spare <= total:
            name = f"{prefix}-{len(groups)}-{os.getpid()}"
            placement_group(
                [{"GPU": spare}],
                bundle_label_selector=[{"ray.io/node-id": tended.node_id}],
                lifetime="detached",
                name=name,
            )
            if spare == total:  # no need to ask which
                tended.ids[name] = list(range(total))
            return
        if sum(held.values()) == total:
            tended.ids, tended.taken = {}, []
            return
        self._probe(tended, held)
        if not tended.probing:
            ours = {gpu for ids in tended.ids.values() for gpu in ids}
            tended.taken = sorted(set(range(total)) - ours)

    def _probe(self, tended: Tended, held: Mapping[str, int]) -> None:
        """Which GPUs a placement group of ours is: Ray tells only processes that run in it."""
        from ray.util.placement_group import get_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        for name, task in list(tended.probing.items()):
            done, _ = self.ray.wait([task], timeout=0)
            if done:
                del tended.probing[name]
                with suppress(self.ray.exceptions.RayError):
                    tended.ids[name] = self.ray.get(task)
        for name, gpus in held.items():
            if name not in tended.ids and name not in tended.probing:
                where = PlacementGroupSchedulingStrategy(get_placement_group(name))
                task = self.ray.remote(_own_gpus).options(num_cpus=0, num_gpus=gpus, scheduling_strategy=where)
                tended.probing[name] = task.remote()

    # Requests --------------------------------------------------------------------------------------------------------

    def retire(self) -> None:
        """The cluster is taken down: actors end their agents and go; reserved GPUs are given back."""
        self.retired = True
        actors = {}
        for listed in self.ray.util.list_named_actors(all_namespaces=True):
            if listed["namespace"] == NAMESPACE and listed["name"].startswith(f"{self.prefix}-"):
                with suppress(ValueError):
                    actors[listed["name"]] = self.ray.get_actor(listed["name"], namespace=NAMESPACE)
        asked = [actor.retire.remote() for actor in actors.values()]
        if asked:
            self.ray.wait(asked, num_returns=len(asked), timeout=15)
        for actor in actors.values():
            self.ray.kill(actor, no_restart=True)
        self._remove(self._groups())

    def answer(self, request: Mapping[str, Any]) -> None:
        try:
            with self.busy:
                if request["op"] == "homes":
                    self.wanted["homes"] = request["homes"]
                    result: Any = None
                elif request["op"] == "retire":
                    result = self.retire()
                elif request["op"] == "check":
                    from thebes.engine.ray.probe import look_around

                    result = look_around(self.ray, request)
                else:
                    raise ValueError(f"unknown request '{request['op']}'")
            self.say({"id": request["id"], "result": result})
        except Exception as error:
            self.say({"id": request["id"], "error": "failed", "detail": _first_line(error)})


def _own_gpus() -> list[int]:
    import ray

    return [int(gpu) for gpu in ray.get_gpu_ids()]


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def main() -> int:
    words = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray prints; our words must stay alone
    wanted = json.loads(sys.stdin.readline() or "{}")
    try:
        ray = load_ray("the Ray engine")
        join(ray, wanted["address"], timeout_s=wanted.get("timeout_s", 10.0))
    except UserError as error:
        print(json.dumps({"push": "error", "message": error.message, "hint": error.hint}), file=words, flush=True)
        return EXIT_REFUSED
    driver = RayDriver(ray, wanted, words)
    if wanted.get("once"):
        driver.say({"push": "nodes", "nodes": [entry(one) for one in ray.nodes()]})
        return 0

    def obey() -> None:
        for line in sys.stdin:
            driver.answer(json.loads(line))
        os._exit(0)  # the controller is gone

    threading.Thread(target=obey, daemon=True).start()
    driver.say({"push": "here", "address": ray.util.get_node_ip_address()})
    driver.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
