# SPDX-License-Identifier: Apache-2.0
"""Environment servers for a PolyBeast learner, on this machine or another.

    python polybeast_env.py --env PongNoFrameskip-v4 --num_servers 8 --auth_token_file token \
        --server_address 0.0.0.0:50051

serves learners that know the token (or, with the --tls flags, have a certificate: see SECURITY.md)
on ports 50051 to 50058. Or they dial in to a learner that listens, from anywhere, at any time:

    python polybeast_env.py --learner host:50050 --num_servers 8 --auth_token_file token

Each server is a process; each stream gets fresh environments, stepped as one batch. A process that
dies is replaced. Needs numpy, gymnasium, grpcio, protobuf and the environment's own packages: no
torch, no compiler.

To serve another environment, edit create_env.
"""

import itertools
import os
import signal
import socket
import sys
import zlib

import atari_wrappers
from beast.envs import gym_envs
from beast.envs.environments import create_environments, sample_environment
from beast.parser import Parser, non_negative, positive
from beast.processes.lifetime import start_logging
from beast.processes.watchdog import print_stacks_on_signal
from beast.servers import credentials, server_processes
from beast.servers.addresses import consecutive_addresses, expand_addresses
from libtorchbeast.access import check_address

# fmt: off
parser = Parser("polybeast_env.py", "Environment servers for PolyBeast.")

run = parser.add_argument_group("run")
run.add_argument("--env", default="PongNoFrameskip-v4",
                 help="Environment of Gymnasium, as ID or module:ID. Learners compare this name.")
run.add_argument("--observation_keys", metavar="KEY,...",
                 help="Observe only these parts of a Dict.")
run.add_argument("--env_backend", default="gym", choices=["gym", "ale_vector", "envpool"],
                 help="gym: environments of create_env, one by one; ale_vector: Atari games of "
                 "ale-py's AtariVectorEnv; envpool: ids of EnvPool (docs/environment.md).")
run.add_argument("--seed", type=non_negative(int),
                 help="Seed of the environments if the learner sends none. Default: random.")
run.add_argument("--server_address",
                 help="host:port of the first server; 0.0.0.0:port for learners on other "
                 "machines. Or unix:/path, with .0, .1, ... appended for several. Default: "
                 "127.0.0.1:50051.")
run.add_argument("--learner", metavar="LIST", help="Dial in to a learner that listens at "
                 "host:port; of several, separated by commas, processes take turns.")
run.add_argument("--num_servers", default=2, type=positive(int),
                 help="Processes; servers have consecutive ports.")
run.add_argument("--envs_per_stream", default=8, type=positive(int),
                 help="Environments stepped as one batch, if the learner sends no number.")
run.add_argument("--stall_timeout_s", default=60, type=positive(float),
                 help="Seconds of silence after which the log names a server and prints its stack; "
                 "it is killed and replaced after five times as long.")
server_processes.add_flags(parser)

access = credentials.add_flags(parser)
access.add_argument("--insecure", action="store_true",
                    help="Serve without token or TLS, to everybody who can reach the address.")

atari_wrappers.add_flags(parser)
# fmt: on


def create_env(flags):
    """Return one environment with a Discrete action space."""
    if gym_envs.is_game(flags.env):
        return atari_wrappers.create_atari(flags, flags.render_mode)
    return gym_envs.create(flags)


def run_server(flags, address, seed, started, busy_since):
    """Run a server in this process until it is stopped.

    Args:
      flags: as of the parser.
      address: of this server; None: dial in to flags.learner.
      seed: ints, by which this process differs from others of the same flags.seed; the first one
        is its number.
      started: called with the address once learners can connect; with that of the learner that has
        accepted us first.
      busy_since: as of libtorchbeast.Server.
    """
    from libtorchbeast import Dialer, Server  # the only use of gRPC, which may not be forked

    streams = itertools.count()

    def make_environments(num_envs, stream_seed, name):
        own_seed = [flags.seed, *seed, next(streams)]
        num_envs = num_envs or flags.envs_per_stream
        return create_environments(flags, create_env, num_envs, stream_seed or own_seed, name)

    with server_processes.busy(busy_since):
        sample_environment(flags, create_env)
    if "cv2" in sys.modules:
        sys.modules["cv2"].setNumThreads(1)
    options = {"make_environments": make_environments, "env": flags.env, "busy_since": busy_since}
    options |= credentials.load(flags)
    if address is None:
        first = zlib.crc32(socket.gethostname().encode()) + flags.seed + seed[0]
        server = Dialer(None, expand_addresses(flags.learner), first, **options)
    else:
        server = Server(None, address, insecure=flags.insecure, **options)
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    server.run(started)


def main(argv=None):
    print_stacks_on_signal()
    flags = server_processes.parse_flags(parser, argv)
    start_logging()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # gRPC's older way to wait for sockets makes a tenth more steps/s of CartPole. But a server then
    # needs Python's lock: a step that keeps it for 30 s loses its stream (docs/reliability.md).
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener,-event_engine_client")
    # Else gRPC logs a line for each connection that TLS refuses, and strangers could fill a disk.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        is_safe = flags.insecure or any(credentials.load(flags).values())
        if flags.learner and flags.server_address:
            raise ValueError("--learner dials in, --server_address serves: give only one")
        if flags.learner and flags.insecure:
            raise ValueError("--insecure is for a server, or for a learner that listens")
        if flags.learner:
            expand_addresses(flags.learner, "--learner")
            addresses = [None] * flags.num_servers
        else:
            address = flags.server_address or "127.0.0.1:50051"
            addresses = consecutive_addresses(address, flags.num_servers)
            for address in addresses:
                check_address(address, is_safe)
        if flags.seed is None:
            flags.seed = int.from_bytes(os.urandom(4), "little")
        return server_processes.supervise(run_server, flags, addresses)
    except (ValueError, RuntimeError) as error:
        sys.exit(f"polybeast_env.py: {error}")


if __name__ == "__main__":
    sys.exit(main())
