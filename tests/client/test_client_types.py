"""What the clients say about types is true: key by key what the server answers with, and the same in both clients."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import pytest
from pydantic import BaseModel

from thebes import client_types
from thebes.api import answers
from thebes.client import AsyncClient, AsyncJob, Client, Job
from thebes.jobspec.spec import JobSpec

# An answer has one name, in the server and in the client.
ANSWERS: dict[str, type[BaseModel]] = {
    name: getattr(answers, name)
    for name, value in vars(client_types).items()
    if typing.is_typeddict(value) and name != "JobFields"
}
NAMES = {model: name for name, model in ANSWERS.items()}
JSON = get_args(get_type_hints(client_types.DecisionInfo)["body"])[1]
SPEC_ONLY = {"command", "snapshot"}  # `submit` takes these as arguments of their own


def wording(kind: Any) -> str:
    """A type as one string, the same for a model's field and for a TypedDict's key."""
    if get_origin(kind) is Annotated:
        return wording(get_args(kind)[0])
    if kind in NAMES:
        return NAMES[kind]
    if kind is Any or kind == JSON:
        return "Json"
    if get_origin(kind) in (Union, types.UnionType):
        return " | ".join(sorted(wording(one) for one in get_args(kind)))
    if get_origin(kind) is typing.Literal:
        return repr(sorted(map(repr, get_args(kind))))
    if get_args(kind):
        return f"{get_origin(kind).__name__}[{', '.join(wording(one) for one in get_args(kind))}]"
    return "None" if kind is types.NoneType else kind.__name__


def fields_of(model: type[BaseModel]) -> dict[str, str]:
    return {name: wording(field.annotation) for name, field in model.model_fields.items()}


def keys_of(typed: type) -> dict[str, str]:
    return {name: wording(kind) for name, kind in get_type_hints(typed).items()}


@pytest.mark.parametrize("name", list(ANSWERS))
def test_a_typed_answer_is_the_servers_answer(name: str) -> None:
    typed = getattr(client_types, name)
    assert keys_of(typed) == fields_of(ANSWERS[name])
    assert typed.__optional_keys__ == frozenset(), "an answer always has all its keys"


def test_the_fields_of_submit_are_those_of_a_job_file() -> None:
    expected = {name: kind for name, kind in fields_of(JobSpec).items() if name not in SPEC_ONLY}
    assert keys_of(client_types.JobFields) == expected


def test_every_answer_of_the_server_has_a_type_in_the_client() -> None:
    models = {
        name for name, value in vars(answers).items() if inspect.isclass(value) and issubclass(value, answers.Out)
    }
    assert models - ANSWERS.keys() == {"Out", "Fault", "Acted", "Health"}, "what the client turns into other things"


# --- signatures ------------------------------------------------------------------------------------------------------


def public(kind: type) -> dict[str, Any]:
    return {name: value for name, value in vars(kind).items() if not name.startswith("_") and callable(value)}


@pytest.mark.parametrize("kind", [Client, AsyncClient, Job, AsyncJob])
def test_every_public_signature_is_typed_and_says_no_any(kind: type) -> None:
    calls = public(kind)
    assert calls
    for name, call in calls.items():
        signature = inspect.signature(call)
        said = [str(one.annotation) for one in list(signature.parameters.values())[1:]]
        for annotation in (*said, str(signature.return_annotation)):
            assert annotation not in ("<class 'inspect._empty'>",), f"{name} is not typed"
            assert not re.search(r"\bAny\b", annotation), f"{name}: {annotation}"


def awaited(annotation: str) -> str:
    """What AsyncClient says, in the words of Client."""
    return re.sub(r"AsyncGenerator\[(.+), None\]", r"Iterator[\1]", annotation).replace("AsyncJob", "Job")


@pytest.mark.parametrize(("plain", "asynchronous"), [(Client, AsyncClient), (Job, AsyncJob)])
def test_both_kinds_have_the_same_calls(plain: type, asynchronous: type) -> None:
    assert list(public(plain)) == list(public(asynchronous))
    for name, call in public(plain).items():
        other = public(asynchronous)[name]
        assert inspect.signature(call).parameters == inspect.signature(other).parameters, name
        assert inspect.signature(call).return_annotation == awaited(inspect.signature(other).return_annotation), name
        assert other.__doc__ == call.__doc__ is not None, name


def test_a_checker_sees_the_types_and_finds_a_fault(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text(
        "import thebes\n"
        "client = thebes.Client()\n"
        "job = client.submit(['true'], gpus=2, array=[1, 2])\n"
        "state: str = job.wait(1.0)['state']\n"
        "busy: int = client.status()['gpus']['busy'] + sum(node['gpus_busy'] for node in client.nodes())\n"
        "info = client.job(job)\n"
        "shown: int = len(info['members']) if 'members' in info else info['preemptions']\n"
        "async def main() -> str:\n"
        "    async with thebes.AsyncClient() as client:\n"
        "        return (await (await client.submit('true')).wait())['state']\n"
    )
    (tmp_path / "bad.py").write_text(
        "import thebes\n"
        "client = thebes.Client()\n"
        "client.submit(['true'], gpu=2)\n"
        "client.status()['gpu']\n"
        "wrong: int = client.wait('1')['state']\n"
    )
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    good, bad = (
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pyright",
                "--pythonpath",
                sys.executable,
                "-p",
                str(tmp_path),
                str(tmp_path / name),
            ],
            capture_output=True,
            text=True,
            timeout=300,
        )
        for name in ("good.py", "bad.py")
    )
    assert good.returncode == 0, good.stdout
    assert bad.returncode == 1
    for line in ("3:", "4:", "5:"):
        assert f"bad.py:{line}" in bad.stdout, bad.stdout
