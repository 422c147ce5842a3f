# SPDX-License-Identifier: Apache-2.0
"""A learner's port for environments that dial in. No torch here."""

import contextlib
import logging
import os
import resource
import socket
import threading
from typing import Any, NamedTuple

import libtorchbeast
from beast.errors import EnvError
from libtorchbeast.access import check_address, split_address, warn_of_loopback

STRANGERS = 768  # connections that are none of environments
SPARE_FILES = 256  # descriptors for all else
GRACE = 5  # seconds for the log's thread to end


class Listening(NamedTuple):
    """A port that is open."""

    address: str  # host:port
    listener: "libtorchbeast.Listener"
    group: Any  # of learners, which have one game and its spaces


def check_listen(flags):
    """Raise ValueError where --listen or --max_streams cannot be served."""
    try:
        own_address(flags)
    except ValueError as error:
        raise ValueError(f"--listen: {error}") from None
    is_safe = flags.insecure or flags.tls_cert or flags.auth_token_file
    try:
        check_address(flags.listen, is_safe)
    except RuntimeError as error:
        raise ValueError(f"--listen: {error}") from None


def allow_files(flags, num_streams):
    """Raise this process's limit of open files to what streams need, and all else.

    Args:
      num_streams: to servers.

    Raises:
      ValueError: the system does not allow it.
    """
    num_dialed = 2 * flags.max_streams + STRANGERS if flags.listen else 0
    needed = num_streams + num_dialed + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        dialed = f" and --max_streams {flags.max_streams}" if flags.listen else ""
        raise ValueError(
            f"{num_streams:,} streams to servers{dialed} may need {needed:,} open files, but the "
            f"limit is {hard:,} (ulimit -Hn): raise it, or take fewer"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def own_address(flags, local_rank=0):
    """Return host and port of this learner: several on a machine have consecutive ports."""
    host, port = split_address(flags.listen)
    port += local_rank if port else 0  # 0: any that is free
    if port >= 2**16:
        raise ValueError(f"learner {local_rank} of this machine would have port {port:,}")
    return host.strip("[]"), port


@contextlib.contextmanager
def listen(flags, credentials, group):
    """Yield a Listening at flags.listen, which is closed with this.

    Args:
      credentials: keyword arguments of libtorchbeast.Listener.
      group: of learners.

    Raises:
      EnvError: the address cannot be listened at.
    """
    address = flags.listen
    try:
        host, port = own_address(flags, group.local_rank)
        address = f"{flags.listen.rpartition(':')[0]}:{port}"
        family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # Of IPv4, too, as servers take it.
        is_any = where[0] == "::" and socket.has_dualstack_ipv6()
        port_socket = socket.create_server(
            (host, port), family=family, backlog=1024, dualstack_ipv6=is_any
        )
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise EnvError(f"cannot listen at {address}: {reason}") from None
    # Else gRPC logs a line for each connection that TLS refuses, and strangers could fill a disk.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    with port_socket:
        listener = libtorchbeast.Listener(port_socket.fileno(), flags.max_streams, **credentials)

        def log_events():
            for event in iter(listener.next_event, None):
                logging.warning("%s", event)

        thread = threading.Thread(target=log_events, name="listener", daemon=True)
        thread.start()
        port = port_socket.getsockname()[1]
        address = f"{flags.listen.rpartition(':')[0]}:{port}"
        logging.info("Listening for environments at %s", address)
        warn_of_loopback(address)
        try:
            yield Listening(address, listener, group)
        finally:
            listener.close()
            thread.join(GRACE)
