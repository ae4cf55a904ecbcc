"""One request to the controller of this folder, which is not repeated."""

from __future__ import annotations

import http.client
import json
import ssl
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from thebes.model.errors import UserError
from thebes.protocol.instance import Instance

if TYPE_CHECKING:
    pass

ANSWER_S = 10.0  # a busy machine may stall for seconds before a living controller answers


@dataclass(frozen=True)
class Reply:
    status: int
    body: dict[str, Any] = field(default_factory=dict)


def ask(
    instance: Instance,
    method: str,
    path: str,
    *,
    body: Any = None,
    with_token: bool = False,
    timeout_s: float,
) -> Reply | None:
    """Send one request to the controller of this folder, without trying again; None if there is no answer."""
    endpoint = instance.read_endpoint()
    if endpoint is None:
        return None
    headers = {"Content-Type": "application/json"}
    if with_token:
        try:
            headers["Authorization"] = f"Bearer {instance.read_token()}"
        except UserError:
            return None
    try:
        connection = _connection(endpoint, timeout_s)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            content = json.loads(response.read() or b"{}")
        finally:
            connection.close()
    except (OSError, ValueError, http.client.HTTPException):
        return None
    return Reply(response.status, content if isinstance(content, dict) else {})


def _connection(endpoint: dict[str, Any], timeout_s: float) -> http.client.HTTPConnection:
    url = urlsplit(endpoint["url"])
    if url.scheme != "https":
        return http.client.HTTPConnection(url.hostname or "", url.port, timeout=timeout_s)
    # We trust the certificate that lies in our own configuration, and not the name in it.
    context = ssl.create_default_context(cafile=endpoint.get("tls_cert"))
    context.check_hostname = False
    return http.client.HTTPSConnection(url.hostname or "", url.port, timeout=timeout_s, context=context)
