# SPDX-License-Identifier: Apache-2.0
"""A learner's environment servers: it starts local ones, or connects to running ones.

The processes that serve are in server_processes.py. PolyBeast's only. No torch here.
"""

import argparse
import contextlib
import json
import logging
import os
import shlex
import subprocess
import sys
import tempfile
import time

import libtorchbeast
from beast.envs.spaces import spaces_from_json
from beast.errors import EnvError, FlagError
from beast.processes.fork_server import remove_after_death
from beast.processes.lifetime import signal_name, socket_folder
from beast.servers import credentials
from beast.servers.addresses import (
    FOLDER_PREFIX,
    consecutive_addresses,
    expand_addresses,
)
from beast.servers.handshakes import answer_timeout, query_servers
from beast.servers.listening import allow_files, check_listen, listen
from beast.servers.server_processes import GRACE, PAUSES
from libtorchbeast.access import is_local


@contextlib.contextmanager
def connect(flags, script, check_actions, group):
    """Yield Servers: those at flags.server_addresses, those that dial in, or else local ones.

    Args:
      flags: of the learner.
      script: path of polybeast_env.py, or of a fork of it, which local servers run; they end with
        this.
      check_actions: called with the action space; raises FlagError where the program cannot use it.
      group: of learners.

    Raises:
      EnvError: the address of --listen is not free.
      FlagError: servers play another game than the one given, or have other actions; or a token
        or certificate cannot be used.
    """
    with contextlib.ExitStack() as stack:
        is_reachable = flags.server_addresses or flags.listen
        try:
            keys = credentials.load(flags) if is_reachable else {}
        except ValueError as error:
            raise FlagError(error) from None
        listening = stack.enter_context(listen(flags, keys, group)) if flags.listen else None
        addresses, local = [], None
        if flags.server_addresses:
            addresses = own_addresses(flags)
        elif starts_servers(flags):  # for this learner alone: they ask for no credentials
            local, keys = stack.enter_context(LocalServers(flags, script)), {}
            addresses = local.addresses
        yield Servers(flags, addresses, keys, check_actions, local, listening)


class Servers:
    """Environment servers that have answered, and environments that dial in.

    Attributes:
      addresses: of all servers.
      listening: for those that dial in, or None.
      num_envs: environments a stream.
      observation_space, action_space: of the environments.
      frame_skip: frames a step.
      spaces: all these as text, for ActorPool.
      env: the name of what they play, or None.
      credentials: keyword arguments for ActorPool.
    """

    def __init__(self, flags, addresses, credentials, check_actions, local=None, listening=None):
        self.addresses, self.credentials, self._local = addresses, credentials, local
        self.listening = listening
        # From the checkpoint, unless envs_per_stream was chosen (for local servers): it has none.
        if listening is not None and flags.spaces is not None and flags.envs_per_stream:
            handshake = {"num_envs": flags.envs_per_stream, "env": flags.env}
            handshake["spaces"] = flags.spaces
        else:
            # One environment will do to answer, where we say how many there are to be.
            num_envs = flags.envs_per_stream and 1

            def check_fit(handshake):
                try:
                    check_env(flags, handshake["env"], "the environments that dial in")
                    check_actions(spaces_from_json(handshake["spaces"])[1])
                except FlagError as error:
                    raise EnvError(f"an environment that does not fit: {error}") from None

            handshake = query_servers(
                addresses, num_envs, local, credentials, listening, check_fit, answer_timeout(flags)
            )
        self.num_envs = flags.envs_per_stream or handshake["num_envs"]
        self.env = handshake["env"] or None
        self.spaces = handshake["spaces"]
        self.observation_space, self.action_space, self.frame_skip = spaces_from_json(self.spaces)
        check_env(flags, self.env, "the environment servers")
        check_actions(self.action_space)

    def pids(self):
        """Return the ids of local processes."""
        return [] if self._local is None else [self._local.process.pid]

    def check(self):
        """Restart local servers that were killed. Raise EnvError if they ended by themselves."""
        if self._local is not None and not self._local.check():
            raise EnvError("the environment servers have ended: see above")


def adopt_env(flags, servers):
    """Return the flags with the game and the frame skip of servers."""
    if flags.env is None and servers.env is not None:
        logging.info("The environments play %s", servers.env)
    found = {"env": flags.env or servers.env, "frames_per_step": servers.frame_skip}
    if servers.listening is not None:  # so that a resumed run need not wait to know them
        found |= {"spaces": servers.spaces, "envs_per_stream": servers.num_envs}
    return argparse.Namespace(**vars(flags) | found)


def check_env(flags, env, who):
    """Raise FlagError where `who` play another game than the one given, or one not to be had."""
    if env and flags.env not in (None, env):
        raise FlagError(
            f"--env (given, or of the checkpoint) is {flags.env}, but {who} play {env}: start some "
            "of that game, or leave --env out with another --xpid"
        )
    if flags.env is None and flags.eval_interval and ":" in (env or ""):  # module:ID
        raise FlagError(
            f"{who} play {env!r}, for which evaluations here would import a module: if you trust "
            f"it, add --env {shlex.quote(env)}"
        )


def check_servers(flags):
    """Raise FlagError where the flags of servers or the compiled part cannot work."""
    try:
        libtorchbeast.ActorPool  # noqa: B018 - where it is not built, this says how to build it
        _check_flags(flags)
    except (ImportError, ValueError) as error:
        raise FlagError(error) from None


def starts_servers(flags):
    """Return whether the learner starts servers of its own; beside a listener only if asked to."""
    if flags.server_addresses:
        return False
    return not flags.listen or bool(flags.num_servers or flags.pipes_basename)


def _check_flags(flags):
    if flags.listen:
        check_listen(flags)
    if flags.server_addresses and flags.num_servers:
        raise ValueError(
            f"--server_addresses ({flags.server_addresses}) names servers that run already, "
            f"--num_servers ({flags.num_servers}) how many to start: give only one"
        )
    if flags.server_addresses and flags.pipes_basename is not None:
        raise ValueError(
            f"--server_addresses ({flags.server_addresses}) names servers that run already, "
            f"--pipes_basename ({flags.pipes_basename}) where to start some: give only one"
        )
    if flags.server_addresses:
        num_addresses = len(own_addresses(flags))
        credentials.load(flags)
    elif starts_servers(flags):
        num_addresses = len(local_addresses(flags, "/a/temporary/folder"))
    else:
        num_addresses = 0
        if flags.num_actors:
            raise ValueError(
                f"--num_actors {flags.num_actors} are streams to servers, but with --listen alone "
                "there are none: leave it out"
            )
    if (flags.num_actors or num_addresses) < num_addresses:
        raise ValueError(
            f"--num_actors is {flags.num_actors}, but there are {num_addresses} servers, each of "
            f"which needs an actor: give it at least {num_addresses}"
        )
    if (flags.num_actors or 0) > libtorchbeast.MAX_STREAMS * num_addresses:
        raise ValueError(
            f"--num_actors is {flags.num_actors}, but {num_addresses} servers take at most "
            f"{libtorchbeast.MAX_STREAMS} streams each"
        )
    if (flags.envs_per_stream or 1) > libtorchbeast.MAX_ENVS:
        raise ValueError(
            f"--envs_per_stream is {flags.envs_per_stream}, but servers step at most "
            f"{libtorchbeast.MAX_ENVS} environments as one batch"
        )
    allow_files(flags, num_addresses and (flags.num_actors or num_addresses))


def own_addresses(flags):
    """Return the addresses of this learner's running servers: every W-th, with W learners."""
    addresses = expand_addresses(flags.server_addresses)
    if len(addresses) < flags.num_learners:
        raise ValueError(
            f"--server_addresses names {len(addresses)} servers, but there are "
            f"{flags.num_learners} learners, each of which needs one"
        )
    return addresses[flags.rank :: flags.num_learners]


def local_addresses(flags, folder):
    """Return addresses for local servers: by default sockets in `folder`."""
    address = flags.pipes_basename or f"unix:{folder}/server"
    addresses = consecutive_addresses(address, flags.num_servers)
    if not is_local(address):
        raise ValueError(
            f"--pipes_basename {address} may be reached from other machines, but servers that are "
            "started here are for this learner alone: give unix:/path or 127.0.0.1:port"
        )
    return addresses


class LocalServers:
    """Servers on this machine, for one learner. Use as a context manager.

    Args:
      flags: of the learner, which are passed on.
      script: path of polybeast_env.py, or of a fork of it.

    Attributes: `addresses`, and the `process` that supervises the servers.
    """

    def __init__(self, flags, script):
        self._folder = tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX, dir=socket_folder())
        remove_after_death(self._folder.name)
        self.addresses = local_addresses(flags, self._folder.name)
        address = flags.pipes_basename or f"unix:{self._folder.name}/server"
        learner_flags = {
            name: value
            for name, value in vars(flags).items()
            if value is not None and name not in (*credentials.FLAGS, "insecure", "spaces")
        }
        for name, value in learner_flags.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError):
                kind = type(value).__name__
                raise FlagError(
                    f"--{name} is a {kind}, which environment servers cannot be given: use "
                    "type=str, int or float"
                ) from None
        self._command = [sys.executable, script, "--server_address", address, "--end_with_stdin"]
        self._command += ["--learner_flags", json.dumps(learner_flags)]

    def __enter__(self):
        self._start()
        return self

    def __exit__(self, *_):
        self.process.stdin.close()  # the server program ends with standard input
        try:
            self.process.wait(GRACE + 2)
        except subprocess.TimeoutExpired:
            self.process.kill()  # its servers end with it
            self.process.wait()
        self._folder.cleanup()

    def _start(self):
        # In a process group of its own, since a Ctrl-C is for the learner, which still needs them.
        self.process = subprocess.Popen(self._command, stdin=subprocess.PIPE, process_group=0)
        logging.info("Starting environment servers (%s): %d", self._command[1], len(self.addresses))

    def check(self):
        """Restart the servers if they were killed; return False if they ended by themselves."""
        status = self.process.poll()
        if status is not None and status < 0:
            how = signal_name(-status)
            logging.error("The environment servers' main process was killed by %s", how)
            self.process.stdin.close()
            time.sleep(PAUSES[0])  # in which its children end
            try:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(self._folder.name, 0o700)
                if os.lstat(self._folder.name).st_uid != os.getuid():
                    raise PermissionError(f"{self._folder.name} belongs to another user")
                self._start()
            except OSError as error:  # no memory, say; the next check tries again
                logging.error("The environment servers cannot be started: %s", error)
        return status is None or status < 0
