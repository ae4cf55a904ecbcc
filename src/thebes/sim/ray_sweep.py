"""Several runs on the machines of a Ray cluster, one task per run, with the same results bit for bit.

Our own code travels along; the machines need Ray, NumPy, Numba, Polars and SciPy. A run whose worker or machine dies is
done again elsewhere. A worker may not have `thebes`, so nothing that travels needs it to be unpickled: a task gets
bytes, puts our code on its path, and only then unpickles them.
"""

from __future__ import annotations

import json
import pickle
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thebes.engine.ray import code as ray_code
from thebes.engine.ray.code import node_folder, unpack
from thebes.engine.ray.session import join, load_ray
from thebes.model.errors import UserError

if TYPE_CHECKING:
    from thebes.model.cluster import Cluster
    from thebes.model.trace import Trace
    from thebes.report.result import Result
    from thebes.sim.choices import Choice
    from thebes.sim.comparison import Advance

POLL_S = 0.2
TELL_EVERY_S = 0.5
TRIES_AGAIN = 5  # for a run whose worker died


def run_on_ray(
    trace: Trace,
    cluster: Cluster,
    choices: Sequence[Choice],
    address: str,
    *,
    workers: int | None = None,
    advance: Advance | None = None,
) -> list[Result]:
    """Results in the order of the choices. `workers` runs go on at a time; by default as many as there are CPUs."""
    ray = load_ray("--ray")
    join(ray, address)
    try:
        return _Sweep(ray, trace, cluster, choices).run(
            workers or len(choices), advance or (lambda _index, _part: None)
        )
    finally:
        ray.shutdown()


class _Sweep:
    def __init__(self, ray: Any, trace: Trace, cluster: Cluster, choices: Sequence[Choice]) -> None:
        self.ray = ray
        self.choices = choices
        self.name = uuid.uuid4().hex[:12]
        if ray.cluster_resources().get("CPU", 0) < 1:
            raise UserError("the Ray cluster has no CPUs to run on", hint="start nodes with --num-cpus of at least 1")
        for module in (sys.modules[__name__], ray_code):
            ray.cloudpickle.register_pickle_by_value(module)
        try:
            task = ray.remote(_run_there)
            self.task = task.options(num_cpus=1, max_retries=TRIES_AGAIN, retry_exceptions=False)
            self.code = ray.put(ray_code.package())
            self.shared = ray.put(pickle.dumps((trace, cluster)))
        finally:
            for module in (sys.modules[__name__], ray_code):
                ray.cloudpickle.unregister_pickle_by_value(module)

    def run(self, at_a_time: int, tell: Advance) -> list[Result]:
        waiting = list(range(len(self.choices)))
        running: dict[Any, int] = {}
        found: dict[int, Result] = {}
        try:
            while waiting or running:
                while waiting and len(running) < at_a_time:
                    index = waiting.pop(0)
                    running[self._start(index)] = index
                done, _ = self.ray.wait(list(running), timeout=POLL_S)
                for one in done:
                    index = running.pop(one)
                    found[index] = self._result(one, index)
                    tell(index, 1.0)
                for index in running.values():
                    tell(index, self._fraction_done(index))
        finally:
            for one in running:  # after an error or Ctrl-C, the other runs need not go on
                self.ray.cancel(one, force=True)
            self._forget()
        return [found[index] for index in range(len(self.choices))]

    def _start(self, index: int) -> Any:
        # A policy from a file of the user's travels by value, because the other machine does not have that file.
        choice = self.choices[index]
        module = sys.modules[type(choice.policy).__module__]
        own = module.__name__.partition(".")[0] != "thebes"
        if own:
            self.ray.cloudpickle.register_pickle_by_value(module)
        try:
            data = self.ray.cloudpickle.dumps(choice)
        finally:
            if own:
                self.ray.cloudpickle.unregister_pickle_by_value(module)
        return self.task.remote(self.code, self.shared, data, f"{self.name}-{index}")

    def _result(self, task: Any, index: int) -> Result:
        label = self.choices[index].policy.label
        try:
            kind, data = self.ray.get(task)
        except self.ray.exceptions.RayError as error:
            why = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise UserError(
                f"the run of {label} was lost {TRIES_AGAIN + 1} times on the Ray cluster: {why}",
                hint="its machines may be short of memory; without --ray it runs here",
            ) from error
        if kind == "missing":
            raise UserError(
                f"a machine of the Ray cluster cannot run simulations: {data}",
                hint="install there: pip install numpy numba polars scipy",
            )
        found = pickle.loads(data)
        if kind == "error":
            raise found
        return found

    def _fraction_done(self, index: int) -> float:
        from ray.experimental.internal_kv import _internal_kv_get  # pyright: ignore[reportMissingImports]

        data = _internal_kv_get(f"{self.name}-{index}", namespace=b"thebes")
        return json.loads(data) if data else 0.0

    def _forget(self) -> None:
        from ray.experimental.internal_kv import _internal_kv_del  # pyright: ignore[reportMissingImports]

        for index in range(len(self.choices)):
            _internal_kv_del(f"{self.name}-{index}", namespace=b"thebes")


def _run_there(code: tuple[str, bytes], shared: bytes, choice_data: bytes, key: str) -> tuple[str, Any]:
    """One run, in a worker of Ray; returns ("result" | "error" | "missing", data)."""
    import time

    from ray.experimental.internal_kv import _internal_kv_put  # pyright: ignore[reportMissingImports]

    folder = str(unpack(*code))
    if folder not in sys.path:
        sys.path.insert(0, folder)
    loaded = sys.modules.get("thebes")
    if loaded is not None and Path(str(loaded.__file__)).parents[1] != Path(folder):  # of another version
        for name in [name for name in sys.modules if name.partition(".")[0] == "thebes"]:
            del sys.modules[name]
    try:
        from thebes.sim.simulate import run
        from thebes.sim.warmup import compile_for, needs_compiling
    except ImportError as error:
        return "missing", str(error)
    last_s = 0.0

    def tell(done: int, of: int, _now: float) -> None:
        nonlocal last_s
        if time.monotonic() > last_s + TELL_EVERY_S:
            last_s = time.monotonic()
            _internal_kv_put(key, json.dumps(done / of), overwrite=True, namespace=b"thebes")

    try:
        trace, cluster = pickle.loads(shared)
        choice = pickle.loads(choice_data)
        if needs_compiling(choice.policy):
            import fcntl

            with (node_folder() / "compiling").open("w") as lock:  # once per machine, not once per task
                fcntl.flock(lock, fcntl.LOCK_EX)
                compile_for(choice.policy)
        return "result", pickle.dumps(run(trace, cluster, choice.policy, choice.options, tell))
    except Exception as error:
        return "error", pickle.dumps(error)
