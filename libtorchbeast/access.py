# SPDX-License-Identifier: Apache-2.0
"""Who may have a server make environments: those on its machine, or who prove who they are."""

import hmac
import ipaddress
import logging
import re
import time

TELL_INTERVAL = 10  # seconds between two lines about strangers, lest they fill the disk


def is_local(address):
    """Say whether it takes a process of this machine to connect: a unix socket, or loopback.

    No host name is, but localhost, whatever it stands for today.
    """
    host = address.rpartition(":")[0].strip("[]")
    if address.startswith("unix:") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_address(address, is_safe):
    """Refuse to listen where strangers could connect.

    Args:
      is_safe: they would be refused (TLS or a token), or are welcome.

    Raises:
      RuntimeError: says what to do.
    """
    if not is_safe and not is_local(address):
        raise RuntimeError(
            f"cannot serve on {address}: other machines may reach it, and nobody would be asked "
            "who they are. Give --tls_cert, --tls_key and --tls_ca; or, on a network that you "
            "trust, --auth_token_file; or --insecure, if all who can reach it may use it. (Of "
            "libtorchbeast.Server: tls, auth_token, insecure.)"
        )


def check_credentials(tls, auth_token):
    """Refuse what can be no credentials: ValueError."""
    if tls is not None and not (
        len(tls) == 3 and all(isinstance(t, (str, bytes)) and t for t in tls)
    ):
        raise ValueError(
            "tls should be three PEM texts: of the authority, the certificate and its key"
        )
    if auth_token is not None and not re.fullmatch("[!-~]+", auth_token):
        raise ValueError("auth_token should be printable ASCII without spaces")


class Doorkeeper:
    """Compares tokens, and tells of those who have another one, but not of each."""

    def __init__(self, auth_token):
        self._auth_token = auth_token
        self._num_refused = 0  # of whom nothing was told yet; threads may miscount a little
        self._told = -TELL_INTERVAL

    def refuse(self, metadata, peer, address):
        """Return a text for a client that is not to come in; None for others."""
        token = metadata.get("auth-token")
        if self._auth_token is None or (
            # In constant time, since time tells how much of a guess was right.
            token is not None and hmac.compare_digest(token.encode(), self._auth_token.encode())
        ):
            return None
        self._num_refused += 1
        if time.monotonic() >= self._told + TELL_INTERVAL:
            logging.warning(
                "%s: refused %d stream(s) without this server's token, most recently of %s",
                *(address, self._num_refused, peer),
            )
            self._num_refused, self._told = 0, time.monotonic()
        problem = "learner has none" if token is None else "learner has another one"
        return f"this server asks for a token, but the {problem}: give both one --auth_token_file"
