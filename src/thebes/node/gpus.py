"""The GPUs of a node: found by NVML, or virtual ones that only exist as numbers.

NVML is imported when it is first asked, so that machines without a GPU need neither the driver nor its Python package.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from thebes.model.errors import UserError
from thebes.protocol.contract import Gpu
from thebes.protocol.instance import Instance, write_json

_WITHOUT = "`thebes up --virtual-gpus N` tries Thebes without GPUs"
_HINT = f"`nvidia-smi` must list the GPUs first: if it does not, the driver needs repair; {_WITHOUT}"


def virtual_gpus(count: int) -> tuple[Gpu, ...]:
    """So many GPUs that do not exist."""
    return tuple(Gpu(index, uuid="", name="virtual", virtual=True) for index in range(count))


def discover() -> tuple[Gpu, ...]:
    """The GPUs of this machine in PCI order; a UserError says what is missing when there are none."""
    try:
        import pynvml
    except ImportError:
        raise UserError(
            "GPUs cannot be looked for: the Python package nvidia-ml-py is missing",
            hint=f"install it with `pip install nvidia-ml-py`; {_WITHOUT}",
        ) from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise UserError(f"no NVIDIA GPU can be used: {_text(error)}", hint=_HINT) from None
    try:
        found = tuple(_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError as error:
        raise UserError(f"the NVIDIA driver does not answer: {_text(error)}", hint=_HINT) from None
    finally:
        pynvml.nvmlShutdown()
    if not found:
        raise UserError("the NVIDIA driver is there but it sees no GPU", hint=_HINT)
    return found


def numbered(count: int, known: Sequence[Gpu], found: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """The `count` GPUs of a node that comes up: those it knew keep their numbers, newcomers take the places left.

    A place that nobody takes is a GPU that is not healthy: the node is there for its jobs on the others.
    """
    known = known or found
    by_uuid = {gpu.uuid: gpu for gpu in found if gpu.uuid}
    places = [*known[:count], *(Gpu(index, healthy=False) for index in range(len(known), count))]
    taken = {gpu.uuid for gpu in places}
    newcomers = iter([gpu for gpu in found[:count] if gpu.uuid and gpu.uuid not in taken])
    here = (by_uuid.get(gpu.uuid) or next(newcomers, None) or replace(gpu, healthy=False) for gpu in places)
    return tuple(replace(gpu, index=index) for index, gpu in enumerate(here))


def looked_at_again(known: Sequence[Gpu], found: Iterable[Gpu]) -> tuple[Gpu, ...]:
    """The GPUs of a node as they were numbered when it came up, and whether each is still all right.

    By their UUIDs: the driver numbers anew when one has gone, and jobs must not be sent to their neighbours' GPUs.
    """
    healthy = {gpu.uuid for gpu in found if gpu.healthy}
    return tuple(replace(gpu, healthy=gpu.uuid in healthy) for gpu in known)


def _gpu(nvml: Any, index: int) -> Gpu:
    """One GPU; healthy if it answers and its memory has not given up."""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid = nvml.nvmlDeviceGetUUID(handle)
        name = nvml.nvmlDeviceGetName(handle)
        memory_gib = round(nvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30, 1)
    except nvml.NVMLError:
        return Gpu(index, healthy=False)
    return Gpu(index, uuid=_str(uuid), name=_str(name), memory_gib=memory_gib, healthy=not _rows_failed(nvml, handle))


def _rows_failed(nvml: Any, handle: Any) -> bool:
    """Whether broken memory rows could not be replaced. Older GPUs do not tell."""
    try:
        return bool(nvml.nvmlDeviceGetRemappedRows(handle)[3])
    except nvml.NVMLError:
        return False


def _str(text: str | bytes) -> str:
    return text.decode() if isinstance(text, bytes) else text


def _text(error: Exception) -> str:
    return str(error).strip().lower() or type(error).__name__


def node_gpus(instance: Instance, node: str, virtual: int | None) -> tuple[tuple[Gpu, ...], bool]:
    """The node's GPUs and whether they are virtual, from config.json or the option."""
    if virtual is not None:
        return virtual_gpus(virtual), True
    try:
        nodes = json.loads(instance.config.read_bytes())["nodes"]
        found = next(one for one in nodes if one["name"] == node)
        count, is_virtual = int(found["gpus"]), bool(found.get("virtual", False))
    except StopIteration:
        raise UserError(f"{instance.config} names no node '{node}'") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{instance.config} cannot be used: {error}", hint="`thebes up` writes a new one") from None
    if is_virtual:
        return virtual_gpus(count), True
    return _real_gpus(instance.nodes / node / "gpus.json", count), False


def _real_gpus(path: Path, count: int) -> tuple[Gpu, ...]:
    """GPUs by the numbers under which earlier agents knew them: jobs that live hold them by these."""
    try:
        known = [Gpu(**one) for one in json.loads(path.read_bytes())]
    except (OSError, ValueError, TypeError):
        known = []
    try:
        found = discover()
    except UserError as error:
        print(error, file=sys.stderr)
        found = ()
    gpus = numbered(count, known, found)
    if [gpu.uuid for gpu in gpus] != [gpu.uuid for gpu in known]:
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_json(path, [asdict(gpu) for gpu in gpus])
        except (OSError, UserError) as error:  # a full disk: jobs need an agent more than we need the file
            print(error, file=sys.stderr)
    return gpus
