# SPDX-License-Identifier: Apache-2.0
"""PolyBeast on Ray: learners, and environments that dial in, on one machine or a cluster.

    python polybeast_ray.py --num_env_processes 7 -- --env PongNoFrameskip-v4    on this machine
    python polybeast_ray.py --num_env_processes 64 --num_learners 2 --address auto -- --env ...

Flags after -- are polybeast.py's; environments get those that polybeast_env.py has, too.

    this program: starts actors; starts all anew from the checkpoint when a learner is lost
      +-- learner actors, with a GPU each        each runs polybeast.py --listen
      |                                                       ^ gRPC: rows and actions
      +-- environment actors, with a core each   each runs polybeast_env.py --learner

Ray restarts environment actors; those without a core wait for nodes to join. All nodes need the
same Python and Ray (requirements-ray.txt), and this folder at the same path.
"""

import itertools
import json
import logging
import os
import random
import secrets
import select
import signal
import socket
import subprocess
import sys
import time

import ray

from beast.errors import FlagError
from beast.parser import Parser, positive, value_of
from beast.processes.lifetime import StopSignals, exit_on_signals, start_logging

# fmt: off
parser = Parser("polybeast_ray.py", "PolyBeast on Ray.")
parser.usage = "%(prog)s [flags] -- [flags of polybeast.py]"
parser.add_argument("--address", metavar="HOST:PORT", help="Ray cluster; auto: that of this "
                    "machine. Default: Ray is started here, for this run.")
parser.add_argument("--num_env_processes", type=positive(int), required=True,
                    help="Environment processes, each on a core.")
parser.add_argument("--num_learners", default=1, type=positive(int),
                    help="Learners, each on a GPU where there are any.")
parser.add_argument("--learner_cores", default=1, type=positive(int), help="Cores of a learner.")
parser.add_argument("words", nargs="*", metavar="FLAGS", help="Flags of polybeast.py.")
# fmt: on

FOLDER = os.path.dirname(os.path.abspath(__file__))
LEARNER_SCRIPT, ENV_SCRIPT = f"{FOLDER}/polybeast.py", f"{FOLDER}/polybeast_env.py"
SAVEDIR = "~/logs/torchbeast"  # as in flags.py
OWN = ("--mode", "--elastic", "--listen", "--insecure", "--auth_token_file", "--server_addresses")
OWN += ("--tls_cert", "--tls_key", "--tls_ca")
PORTS = range(20_000, 32_000)  # of which the kernel and Ray give none out
TOKEN_FD = 500  # one free number in all learners, which compare their flags
MIN_SECONDS, MAX_FAILURES = 60, 3  # so many starts in a row that last less end the run
PAUSE, LOST = 5, -9  # seconds before another start; status of a learner whose actor was lost


class Host:
    """An actor: runs a program as its child, which ends with it."""

    def __init__(self, name, token):
        self._name, self._start = name, time.monotonic()
        memory = os.memfd_create("token")  # no file, which a node that is lost would keep
        os.fchmod(memory, 0o600)
        os.write(memory, token.encode())
        os.dup2(memory, TOKEN_FD)
        self._stops = socket.socketpair()
        self._stops[1].setblocking(False)
        signal.set_wakeup_fd(self._stops[1].fileno())  # Ray's main thread runs no Python handler

    def __repr__(self):  # which Ray prints before each line of its output
        return self._name

    def call(self, function, *args):
        return function(*args)

    def run(self, script, words, variables, is_learner):
        """Run a program; return its status, < 0 of a signal; of environments if they cannot run."""
        # The path has to be the same for all learners, and good for an environment's processes.
        token = f"/proc/{'self' if is_learner else os.getpid()}/fd/{TOKEN_FD}"
        environment = os.environ | {name: str(value) for name, value in variables.items()}
        environment.pop("OMP_NUM_THREADS", None)  # which Ray sets to 1
        child = subprocess.Popen(
            [sys.executable, script, *words, "--auth_token_file", token, "--end_with_stdin"],
            stdin=subprocess.PIPE, env=environment, pass_fds=[TOKEN_FD], start_new_session=True,
        )  # fmt: skip
        ready, _, _ = select.select([os.pidfd_open(child.pid), self._stops[0]], [], [])
        if self._stops[0] in ready:
            child.terminate()
        status = child.wait()
        if not is_learner and (status != 1 or time.monotonic() > self._start + MIN_SECONDS):
            time.sleep(PAUSE)
            os._exit(1)  # Ray starts this actor again, elsewhere if this node is gone
        return -signal.SIGTERM if self._stops[0] in ready else status

    def stop(self):
        """Send SIGTERM to the program, as SIGTERM to this actor does."""
        self._stops[1].send(b"\0")


def connect(flags):
    """Start Ray, or connect to it; return what a learner needs. Refuse what has no room."""
    options = {} if flags.address else {"include_dashboard": False, "object_store_memory": 80 << 20}
    try:
        ray.init(flags.address or "local", **options)
    except (ConnectionError, RuntimeError, ValueError) as error:  # other versions, too
        raise FlagError(f"--address {flags.address}: {' '.join(str(error).split())}") from None
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cores, gpus = (int(sum(node.get(name, 0) for node in nodes)) for name in ("CPU", "GPU"))
    needs = {"CPU": flags.learner_cores}
    needs |= {"GPU": 1} if gpus and "--disable_cuda" not in flags.words else {}
    room = sum(min(node.get(name, 0) // n for name, n in needs.items()) for node in nodes)
    if flags.num_learners > room:
        raise FlagError(
            f"--num_learners is {flags.num_learners}, each of which needs {needs} of a node, but "
            f"there is room for {room:.0f}: Ray has {cores} CPUs and {gpus} GPUs"
        )
    wanted = flags.num_learners * flags.learner_cores + flags.num_env_processes
    if wanted > cores and not flags.address:  # no node will join
        raise FlagError(f"--num_env_processes and learners need {wanted} cores; Ray has {cores}")
    return needs


def start_hosts(name, number, token, needs, **options):
    options |= {"num_cpus": needs["CPU"], "num_gpus": needs.get("GPU", 0), "max_concurrency": 3}
    # Else Ray kills the children of actors: a learner could not save.
    options["runtime_env"] = {"env_vars": {"RAY_kill_child_processes_on_worker_exit": "0"}}
    host = ray.remote(Host).options(**options)
    return [host.remote(f"{name} {i}", token) for i in range(number)]


def call(hosts, function, *args):
    return ray.get([host.call.remote(function, *args) for host in hosts])


def check_savedir(learners, ips, savedir):
    """Refuse a folder that is not the same one for all learners."""
    path = os.path.join(savedir, f".{secrets.token_hex(8)}")
    call(learners[:1], os.makedirs, path)
    found = call(learners, os.path.exists, path)
    call(learners[:1], os.rmdir, path)
    if not all(found):
        raise FlagError(
            f"--savedir {savedir} is not on a file system that learners share: what the one on "
            f"{ips[0]} writes there, the one on {ips[found.index(False)]} does not see"
        )


def start_learners(flags, learners, words):
    """Start their programs; return the calls that run them, and addresses for environments."""
    find_ip = ray.util.get_node_ip_address
    ips = call(learners, find_ip) if flags.address else ["127.0.0.1"] * len(learners)
    gpus, port = call(learners, os.getenv, "CUDA_VISIBLE_DEVICES", ""), random.choice(PORTS)
    if len(learners) > 1:
        check_savedir(learners, ips, value_of("savedir", words))
    words = [*words, "--listen", f"{'0.0.0.0' if flags.address else ips[0]}:{port}"]
    calls, addresses = [], []
    for rank, (learner, ip) in enumerate(zip(learners, ips, strict=True)):
        here = [other for other, other_ip in enumerate(ips) if other_ip == ip]
        variables = {  # torchrun's
            "TORCHELASTIC_RUN_ID": "ray", "RANK": rank, "WORLD_SIZE": len(learners),
            "LOCAL_RANK": here.index(rank), "LOCAL_WORLD_SIZE": len(here),
            "MASTER_ADDR": ips[0], "MASTER_PORT": port + len(learners),
            "CUDA_VISIBLE_DEVICES": ",".join(gpus[other] for other in here),
        } if len(learners) > 1 else {}  # fmt: skip
        calls.append(learner.run.remote(LEARNER_SCRIPT, words, variables, is_learner=True))
        addresses.append(f"{ip}:{port + here.index(rank)}")  # where it listens
    return calls, addresses


def train(flags, needs, words, token, stop):
    """Start learners and environments; return the learners' statuses, negative for those lost."""
    learners = start_hosts("learner", flags.num_learners, token, needs)
    environments, plays = [], []
    logging.info("Waiting until learners have a node: %d", len(learners))
    try:
        waiting = [learner.call.remote(os.getpid) for learner in learners]
        while waiting and not stop.first:
            waiting = ray.wait(waiting, timeout=1)[1]
        if stop.first:
            return []
        calls, addresses = start_learners(flags, learners, words)
        environments = start_hosts(
            "environments", flags.num_env_processes, token, {"CPU": 1},
            scheduling_strategy="SPREAD", max_restarts=-1, max_task_retries=-1,
        )  # fmt: skip
        env_words = ["--num_servers", "1", "--learner_flags", json.dumps(flags.words), "--learner"]
        for host, address in zip(environments, itertools.cycle(addresses), strict=False):
            plays.append(host.run.remote(ENV_SCRIPT, [*env_words, address], {}, is_learner=False))
        statuses, stopping = {}, []
        while len(statuses) < len(calls):
            if len(ray.wait(plays, num_returns=len(plays), timeout=0)[0]) == len(plays):
                raise FlagError("all environments have ended by themselves: see above")
            if not stopping and (stop.first or any(statuses.values())):
                stopping = [learner.stop.remote() for learner in learners]
            for done in ray.wait([c for c in calls if c not in statuses], timeout=1)[0]:
                try:
                    statuses[done] = ray.get(done)
                except ray.exceptions.RayError as error:
                    logging.error("A learner was lost: %s", " ".join(str(error).split()))
                    statuses[done] = LOST
        return [statuses[c] for c in calls]
    except ray.exceptions.RayTaskError as error:
        raise FlagError(f"a learner cannot run: {error.cause}") from None
    except ray.exceptions.RayError as error:
        logging.error("A learner was lost: %s", " ".join(str(error).split()))
        return [LOST]
    finally:
        for host in learners + environments:
            ray.kill(host)  # of which its child takes notice


def main(argv=None):
    flags = parser.parse_args(argv)
    start_logging()
    exit_on_signals()
    stop = StopSignals(lambda name: logging.info("%s: learners save, and all ends", name))
    xpid = value_of("xpid", flags.words) or time.strftime("polybeast-%Y%m%d-%H%M%S")
    savedir = os.path.abspath(os.path.expanduser(value_of("savedir", flags.words) or SAVEDIR))
    words = [*flags.words, "--xpid", xpid, "--savedir", savedir]
    token, num_failures, is_first = secrets.token_hex(32), 0, True
    try:
        if own := [word for word in flags.words if word.partition("=")[0] in OWN]:
            raise FlagError(f"{own[0]} is not for this program: leave it out")
        needs = connect(flags)
        stop.catch()  # Ray has set handlers of its own
        while not stop.first:
            start = time.monotonic()
            statuses = train(flags, needs, words, token, stop)
            if stop.first or not any(statuses):
                break
            num_failures = num_failures + 1 if time.monotonic() < start + MIN_SECONDS else 0
            ends = f"the learners ended with status {', '.join(map(str, statuses))}"
            # Those that were not lost, but ended by themselves at once, have said why.
            if num_failures == MAX_FAILURES or is_first and num_failures and min(statuses) >= 0:
                raise FlagError(f"{ends}: see above")
            logging.error("All start anew from the checkpoint: %s", ends)
            is_first = False
            time.sleep(PAUSE)
    except FlagError as error:
        sys.exit(f"polybeast_ray.py: {error}")
    finally:
        ray.shutdown()
    return 128 + stop.first if stop.first else 0


if __name__ == "__main__":
    sys.exit(main())
