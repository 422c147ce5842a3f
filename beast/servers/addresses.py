# SPDX-License-Identifier: Apache-2.0
"""Addresses of environment servers, host:port or unix:/path, and checking them."""

import contextlib
import os
import re

from beast.processes.lifetime import MAX_SOCKET_PATH
from libtorchbeast.access import split_address

FOLDER_PREFIX = "polybeast-"  # of the temporary folders that learners make for sockets


def _check_path(address):
    """Raise ValueError for a unix:/path that is too long for a socket."""
    path = address.removeprefix("unix:").removeprefix("//")
    if address.startswith("unix:") and len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise ValueError(
            f"the address {address} is too long: a socket's path has at most "
            f"{MAX_SOCKET_PATH} bytes, but this has {len(os.fsencode(path))}"
        )


def consecutive_addresses(address, num_servers):
    """Return the addresses of so many servers, from the first one on."""
    if re.fullmatch(r"unix:.+", address):
        addresses = [f"{address}.{i}" for i in range(num_servers)]
        addresses = [address] if num_servers == 1 else addresses
        _check_path(addresses[-1])
        return addresses
    try:
        host, port = split_address(address)
    except ValueError as error:
        raise ValueError(f"{error}; or unix:/path") from None
    if not 1 <= port <= port + num_servers - 1 < 2**16:
        raise ValueError(
            f"with --num_servers {num_servers} the address {address} takes the ports "
            f"{port} to {port + num_servers - 1}, but there are only 1 to {2**16 - 1}"
        )
    return [f"{host}:{port + i}" for i in range(num_servers)]


def expand_addresses(text, flag="--server_addresses"):
    """Return the addresses in "host:port,host:first_port-last_port,unix:/path"."""
    addresses = []
    for part in text.split(","):
        match = re.fullmatch(r"(unix:.+)|([^:]+|\[.+\]):(\d+)(?:-(\d+))?", part.strip())
        first, last = (int(match[3] or 1), int(match[4] or match[3] or 1)) if match else (0, 0)
        if not 1 <= first <= last < 2**16:
            raise ValueError(
                f"{flag} has {part!r}; give host:port, host:first_port-last_port or "
                "unix:/path, separated by commas"
            )
        _check_path(match[1] or "")
        addresses += [match[1] or f"{match[2]}:{port}" for port in range(first, last + 1)]
    return addresses


def remove_socket(address):
    """Remove a server's socket, and the folder made for it."""
    if address.startswith("unix:"):
        with contextlib.suppress(OSError):
            os.unlink(address.removeprefix("unix:"))
    remove_folder(address)


def remove_folder(address):
    """Remove the temporary folder that a learner, which may have been killed, made for a socket."""
    folder = os.path.dirname(address.removeprefix("unix:"))
    if os.path.basename(folder).startswith(FOLDER_PREFIX):
        with contextlib.suppress(OSError):  # where it is not empty yet
            os.rmdir(folder)
