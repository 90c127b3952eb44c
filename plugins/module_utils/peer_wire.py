# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""How the nodes of a replica talk: one sealed request and one sealed answer a connection.

The server opens with a nonce; a request carries an HMAC (SHA-256, key of the replica from a 0600 file) over
both nonces and everything it says, and so does the answer. The server is ``sparkfleet-node peer``; the agent,
the guard and the modules are clients.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
from collections.abc import Iterable, Mapping
from typing import Any

from .host_io import Host, Refusal
from .rank_state import key_path

Json = dict[str, Any]

#: Longest line, bytes. A contract is about 2 kB.
LIMIT = 65536
#: Seconds that one exchange may take.
TIMEOUT = 5.0


class PeerUnreachable(Exception):
    """Nobody answered on any address. Silence is not a state."""


class PeerRefused(Exception):
    """The peer answered, but not with our key, or it refused the request."""


def read_key(host: Host, replica: str) -> bytes:
    """The replica's key. Raises ``Refusal`` when there is none or others may read it."""
    path = key_path(replica)
    text = host.read(path)
    if text is None or len(text.strip()) < 32:
        raise Refusal(f"no peer key for {replica}", f"{path} absent or short", "a key", "run site.yml")
    if host.path(path).stat().st_mode & 0o077:
        raise Refusal(f"{path} is readable by others", "not 0600", "0600", "run site.yml")
    return text.strip().encode("ascii", "strict")


def mac(key: bytes, *parts: str) -> str:
    """HMAC over parts that are each preceded by their length, so that no two lists of parts are one text."""
    seal = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        data = part.encode("utf-8")
        seal.update(f"{len(data)}:".encode("ascii") + data)
    return seal.hexdigest()


def ask(  # noqa: PLR0917
    addresses: Iterable[str],
    port: int,
    key: bytes,
    replica: str,
    op: str,
    body: Mapping[str, Any] | None = None,
    *,
    timeout: float = TIMEOUT,
) -> Json:
    """Ask a peer on the first of its addresses that answers.

    :raises PeerUnreachable: no address answered.
    :raises PeerRefused: an answer came that is not sealed with our key, or that is an error.
    """
    failures = []
    for address in addresses:
        try:
            with socket.create_connection((address, port), timeout) as link, link.makefile("rwb") as stream:
                opening = json.loads(stream.readline(LIMIT))
                nonce, mine, text = str(opening["nonce"]), secrets.token_hex(16), json.dumps(dict(body or {}))
                message = {
                    "replica": replica,
                    "op": op,
                    "nonce": mine,
                    "body": text,
                    "mac": mac(key, "request", nonce, mine, replica, op, text),
                }
                stream.write(json.dumps(message).encode("utf-8") + b"\n")
                stream.flush()
                line = stream.readline(LIMIT * 4)
        except (OSError, ValueError, KeyError, TypeError) as error:
            failures.append(f"{address}: {error or type(error).__name__}")
            continue
        if not line:
            raise PeerRefused(f"{address} dropped the message: the peer keys of the nodes differ")
        try:
            reply = json.loads(line)
            answer, seal = str(reply["body"]), str(reply["mac"])
        except (ValueError, KeyError, TypeError) as error:
            raise PeerRefused(f"{address} answered something else") from error
        if not hmac.compare_digest(seal, mac(key, "reply", nonce, mine, answer)):
            raise PeerRefused(f"{address} answered with another key")
        result: Json = json.loads(answer)
        if "error" in result:
            raise PeerRefused(f"{address}: {result['error']}")
        return result
    raise PeerUnreachable("; ".join(failures) or "no address")
