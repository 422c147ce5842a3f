# SPDX-License-Identifier: Apache-2.0
"""Environment servers: processes that play for a PolyBeast learner, on this machine or another.

    python polybeast_env.py --env PongNoFrameskip-v4 --num_servers 8 --auth_token_file token \
        --server_address 0.0.0.0:50051

serves learners that know the token (or, with the --tls flags, have a certificate: see SECURITY.md)
on ports 50051 to 50058. Each server is a process; each stream of a learner to it gets fresh
environments, stepped as one batch. A server that dies is started anew. Needs numpy, gymnasium,
grpcio, protobuf and the environment's own packages: no torch, no compiler.

To serve another environment, edit create_env.
"""

import packages  # first: it tells what to install, if one of the following is missing

# isort: split

import argparse
import itertools
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time

import atari_wrappers
import credentials
import servers
from ale_vector import AtariEnvironments
from environment import Environments
from libtorchbeast.access import check_address
from watchdog import print_stacks_on_signal

# fmt: off
parser = argparse.ArgumentParser(
    description="Environment servers for PolyBeast.", allow_abbrev=False)

run = parser.add_argument_group("run")
run.add_argument("--env", default="PongNoFrameskip-v4",
                 help="Atari game of ale-py; for any other environment, edit create_env. "
                 "(default: %(default)s)")
run.add_argument("--env_backend", default="gym", choices=["gym", "ale_vector"],
                 help="What steps the games: one environment after the other, or ale-py's "
                 "AtariVectorEnv, whose games differ a little (docs/ale_vector.md). "
                 "(default: %(default)s)")
run.add_argument("--seed", type=int, help="Seed of the environments, where the learner gives none. "
                 "By default a random one.")
run.add_argument("--server_address", default="127.0.0.1:50051",
                 help="host:port of the first server; 0.0.0.0:port for learners on other "
                 "machines. Or unix:/path, with .0, .1, ... appended for several. "
                 "(default: %(default)s)")
run.add_argument("--num_servers", default=2, type=int,
                 help="Server processes, on consecutive ports. (default: %(default)s)")
run.add_argument("--envs_per_stream", default=8, type=int,
                 help="Environments stepped as one batch, where the learner names no number. "
                 "(default: %(default)s)")
run.add_argument("--stall_timeout_s", default=60, type=float,
                 help="Seconds for which environments may keep silent before the log tells of it, "
                 "with the server's stack; it is killed and replaced after five times as long. "
                 "(default: %(default)s)")
run.add_argument("--end_with_stdin", action="store_true",
                 help="End when standard input ends: for programs, and ssh, that must not leave "
                 "servers behind.")

access = credentials.add_flags(parser)
access.add_argument("--insecure", action="store_true",
                    help="Serve whoever can reach --server_address, on other machines too.")

atari_wrappers.add_flags(parser)
# fmt: on


def create_env(flags):
    """Return one environment with a Discrete action space."""
    if getattr(flags, "mode", "train") != "train":  # polybeast.py tests with this one, too
        flags = argparse.Namespace(**vars(flags) | {"episodic_life": False})  # whole games
    return atari_wrappers.create_atari(flags, getattr(flags, "render_mode", None))


def create_environments(flags, num_envs, seed, name):
    """Return environments as the rows of a rollout."""
    if flags.env_backend == "ale_vector":
        return AtariEnvironments(flags, num_envs, seed, name)
    return Environments(lambda: create_env(flags), num_envs, seed, name)


def serve(flags, address, seed=(), started=None, stop_signals=(), busy_since=None):
    """Serve in this process until it is told to stop.

    Args:
      flags: as of the parser.
      address: of this server.
      seed: ints, by which this process differs from others of the same flags.seed.
      started: called with the address once learners can connect.
      stop_signals: signals that end it.
      busy_since: as of libtorchbeast.Server.
    """
    from libtorchbeast import Server  # the only use of gRPC, which may not be forked

    streams = itertools.count()

    def make_environments(num_envs, wished_seed, name):
        own_seed = [flags.seed, *seed, next(streams)]
        num_envs = num_envs or flags.envs_per_stream
        return create_environments(flags, num_envs, wished_seed or own_seed, name)

    server = Server(
        None,
        address,
        make_environments=make_environments,
        busy_since=busy_since,
        insecure=flags.insecure,
        **credentials.load(flags),
    )
    for number in stop_signals:
        signal.signal(number, lambda *_: server.stop())
    server.run(started)


def be_server(flags, address, seed, pipe, busy_since):
    """Be the server at `address`: a process. Tell through the pipe when it serves, or why not."""

    served = []  # the address, once it is ours

    def end_with_parent():
        sentinel = multiprocessing.parent_process().sentinel
        while not multiprocessing.connection.wait([sentinel], timeout=1):
            busy_since[-1] = time.monotonic()  # alive
        for address in served:
            servers.remove_socket(address)
            servers.remove_temporary_folder(address)
        os._exit(1)  # at once, whatever the environments are doing

    def started(address):
        served.append(address)
        pipe.send(None)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process decides what to do
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    print_stacks_on_signal()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, servers.HANDLED_SIGNALS)
    threading.Thread(target=end_with_parent, daemon=True).start()
    os.nice(10)  # a learner on the same machine comes first
    start_logging()
    try:
        create_environments(flags, 1, [flags.seed], "the environment").close()
        if "cv2" in sys.modules:
            sys.modules["cv2"].setNumThreads(1)
        serve(flags, address, seed, started, [signal.SIGTERM], busy_since)
    except Exception as error:
        pipe.send((str(error) or type(error).__name__) + packages.advice(error))
        sys.exit(1)


def main(argv=None):
    print_stacks_on_signal()
    flags = parser.parse_args(argv)
    start_logging()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # gRPC's older way to wait for sockets needs fewer threads: 150 us a message instead of 200.
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")
    # Else a line for each stranger whom TLS keeps out, and so a full disk at their will.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        addresses = servers.consecutive_addresses(flags.server_address, flags.num_servers)
        is_safe = flags.insecure or any(credentials.load(flags).values())
        for address in addresses:
            check_address(address, is_safe)
        if flags.envs_per_stream < 1:
            raise ValueError(f"--envs_per_stream is {flags.envs_per_stream}; it must be positive")
        if not flags.stall_timeout_s > 0:
            raise ValueError(f"--stall_timeout_s is {flags.stall_timeout_s}; it must be positive")
        if flags.seed is None:
            flags.seed = int.from_bytes(os.urandom(4), "little")
        if flags.seed < 0:
            raise ValueError(f"--seed is {flags.seed}; it must not be negative")
        return servers.keep_serving(be_server, flags, addresses)
    except (ValueError, RuntimeError) as error:
        sys.exit(f"polybeast_env.py: {error}")


def start_logging():
    log_format = "[%(levelname)s %(asctime)s %(process)d] %(message)s"
    logging.basicConfig(format=log_format, level=logging.INFO)


if __name__ == "__main__":
    sys.exit(main())
