"""Decides which requests to the server of the screen are accepted. No sockets here."""

# A request must pass three checks:
# 1. Host is a name of loopback. Otherwise a foreign page could read the answers, after its own host name was made to
#    resolve to 127.0.0.1 (DNS rebinding).
# 2. Origin, if the browser sends it, is this server. Otherwise a foreign page could open the websocket.
# 3. The first part of the path is the token. Otherwise other users of this machine could watch.

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence

# Host names that a browser of this machine uses, with any port: `ssh -L 9000:127.0.0.1:8642` changes the port.
_LOOPBACK = re.compile(r"(?:127\.0\.0\.1|localhost|\[::1\])(?::[0-9]{1,5})?", re.IGNORECASE)


def refusal(hosts: Sequence[str], origins: Sequence[str], path: str, token: str) -> str | None:
    """Return why a request is refused, or None if it is accepted.

    `hosts` and `origins` are the values of the headers Host and Origin. `path` is decoded.
    """
    if len(hosts) != 1 or not _LOOPBACK.fullmatch(hosts[0]):
        return "open this server as 127.0.0.1 or localhost"
    if any(origin.lower() != f"http://{hosts[0].lower()}" for origin in origins):
        return "a foreign page asked for this"
    if not hmac.compare_digest(path.split("/")[1].encode() if "/" in path else b"", token.encode()):
        return "open the whole address that `cbtop --web` printed; it ends with a token"
    return None
