# SPDX-License-Identifier: Apache-2.0
"""Access to a server: for processes of its machine, or with a certificate or a token."""

import collections
import contextlib
import hmac
import ipaddress
import logging
import re
import socket
import time

LOG_INTERVAL = 10  # seconds between two lines about strangers, who could fill the disk


def printable(text):
    """Return text of a peer (a str or UTF-8), escaped for a log.

    Control characters are escaped, and no line but the first can look like a log line.
    """
    text = text if isinstance(text, str) else text.decode(errors="replace")
    lines = [
        line if line.isprintable() else
        "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
        for line in text.split("\n")
    ]  # fmt: skip
    return "\n  | ".join(lines)


def is_local(address):
    """Return whether an address is local: a unix socket, or loopback.

    Of host names, only localhost counts as local.
    """
    host = address.rpartition(":")[0].strip("[]")
    if address.startswith("unix:") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def warn_of_loopback(address):
    """Warn where a host name, by which other machines would look for us, is loopback here."""
    host = address.rpartition(":")[0].strip("[]")
    with contextlib.suppress(OSError):
        ip = socket.getaddrinfo(host, None)[0][4][0]
        if not is_local(address) and ipaddress.ip_address(ip).is_loopback:
            logging.warning(
                "%s is %s on this machine (/etc/hosts), which no other machine can reach: listen "
                "at 0.0.0.0 instead",
                host, ip,
            )  # fmt: skip


def check_address(address, is_safe):
    """Refuse to listen where strangers could connect.

    Args:
      is_safe: strangers are refused (by TLS or a token), or --insecure was given.

    Raises:
      RuntimeError: the message says what to do.
    """
    if not is_safe and not is_local(address):
        raise RuntimeError(
            f"cannot serve on {address}: other machines may reach it, and anybody there could "
            "connect. Give --tls_cert, --tls_key and --tls_ca; or, on a network that you "
            "trust, --auth_token_file; or --insecure, if all who can reach it may use it. (Of "
            "libtorchbeast.Server: tls, auth_token, insecure.)"
        )


def check_credentials(tls, auth_token):
    """Raise ValueError for values that cannot be credentials."""
    if tls is not None and not (
        len(tls) == 3 and all(isinstance(t, (str, bytes)) and t for t in tls)
    ):
        raise ValueError(
            "tls should be three PEM texts: of the authority, the certificate and its key"
        )
    if auth_token is not None and not re.fullmatch("[!-~]+", auth_token):
        raise ValueError("auth_token should be printable ASCII without spaces")


def pem_bytes(tls):
    """Return PEM texts as bytes."""
    return [text if isinstance(text, bytes) else text.encode() for text in tls]


def split_address(address):
    """Return host and port of "host:port"; an IPv6 address is in brackets, which the host keeps.

    Raises:
      ValueError: it is no such text.
    """
    match = re.fullmatch(r"(\[[^\[\]]+\]|[^:\[\]]+):(\d{1,5})", address)
    if not match or int(match[2]) >= 2**16:
        raise ValueError(
            f"the address {address!r} should be host:port, with a port below {2**16:,}"
        )
    return match[1], int(match[2])


class TokenCheck:
    """Compares tokens, and logs refused streams at a limited rate."""

    def __init__(self, auth_token):
        self._auth_token = auth_token
        self._throttle = Throttle()

    def refuse(self, metadata, peer, address):
        """Return why a client is refused; None where it is not."""
        token = metadata.get("auth-token")
        if self._auth_token is None or (
            # In constant time, since time would show how much of a guess was right.
            token is not None and hmac.compare_digest(token.encode(), self._auth_token.encode())
        ):
            return None
        if count := self._throttle.count():
            logging.warning(
                f"{address}: refused {count} stream(s) without this server's token, most recently "
                f"from {peer}"
            )
        problem = "learner has none" if token is None else "learner has another one"
        return f"this server asks for a token, but the {problem}: give both ends the same"


class Throttle:
    """Counts events that strangers can cause, to limit how often they are logged."""

    def __init__(self):
        self._num_events = 0  # since the last log line; threads may miscount a little
        self._next_time = 0.0

    def count(self):
        """Count one more event. Return the number since the last log line; 0: log none now."""
        self._num_events += 1
        if time.monotonic() < self._next_time:
            return 0
        num_events, self._num_events = self._num_events, 0
        self._next_time = time.monotonic() + LOG_INTERVAL
        return num_events


class PeerLog:
    """Logs events caused by peers, each kind at most once in LOG_INTERVAL."""

    def __init__(self):
        self._throttles = collections.defaultdict(Throttle)

    def error(self, what, name, text):
        if count := self._throttles[what].count():
            more = f" ({count} streams since the last such line)" if count > 1 else ""
            logging.error("%s: %s%s: %s", name, what, more, printable(text))


class LogThrottle:
    """A filter of a logger: shortens its records and drops most of them."""

    def __init__(self):
        self._throttle = Throttle()

    def __call__(self, record):
        count = self._throttle.count()
        text = f"{record.levelname} of gRPC, {count} of this kind: {record.getMessage():.200}"
        text = printable(text)
        record.msg, record.args, record.exc_info, record.exc_text = text, (), None, None
        return bool(count)
