# SPDX-License-Identifier: Apache-2.0
"""What environments say of themselves: a learner asks before it makes its net. No torch here."""

import collections
import logging
import queue
import threading
import time

import libtorchbeast
from beast.envs.spaces import row_ranges, spaces_from_json
from beast.errors import EnvError
from beast.processes.watchdog import PATIENCE
from libtorchbeast.access import Throttle

FIRST_LINE = 2  # seconds without an answer after which the log says so
DIAL_LINE = 10  # seconds between two log lines while nobody has dialed in
CONNECT_TIMEOUT = 20  # seconds until the log says why a server cannot be reached, and again
ANSWER_TIMEOUT = 300  # seconds, at least, to make environments, to reset or to step them
MAX_NAME = 200  # characters
MAJORITY_TIMEOUT = 5  # seconds after the first answer in which others count


def query_servers(
    addresses,
    num_envs,
    local=None,
    credentials=None,
    listening=None,
    check_fit=None,
    timeout=ANSWER_TIMEOUT,
):
    """Wait for the handshake of environments; return it as a dict.

    All servers are asked at the same time, again and again. Of the answers within MAJORITY_TIMEOUT
    of the first, the most frequent one is returned; of equally frequent ones, that of the server
    that is listed first. With several learners that listen, the first answer at one is that of all.

    Args:
      num_envs: environments that each creates to answer; None: its default.
      local: LocalServers, which are not waited for once they have ended.
      credentials: keyword arguments of libtorchbeast.query_server.
      listening: a Listening, whose environments are asked, too; the log says which are refused.
      check_fit: called with the handshakes of those that dial in; EnvError: they do not fit.
      timeout: seconds for a server to make its environments.

    Raises:
      EnvError: every server answers, none can be used, and nothing can dial in.
    """
    answers, done = queue.SimpleQueue(), threading.Event()

    def ask(address):
        answer = None
        while not done.is_set() and (answer is None or isinstance(answer, OSError)):
            try:
                answer = libtorchbeast.query_server(
                    address, num_envs, timeout, CONNECT_TIMEOUT, check=check_handshake,
                    **credentials or {},
                )  # fmt: skip
            except EnvError as error:  # of check_handshake
                answer = ConnectionRefusedError(f"the environment server at {address} has {error}")
            except BaseException as error:
                answer = error
            answers.put((address, answer))
            if isinstance(answer, ConnectionError):
                done.wait(2)  # before it is asked again

    def check_dialed(handshake):
        try:
            ranges = check_handshake(handshake)
            if check_fit is not None:
                check_fit(handshake)
            return ranges
        except EnvError as error:
            raise ConnectionRefusedError(*error.args) from None

    def ask_those_that_dial():
        try:
            answer = listening.listener.query(num_envs, timeout, check=check_dialed)
        except BaseException as error:
            answer = error
        answers.put((None, answer))

    # In threads, so that Ctrl-C reaches this one.
    for address in sorted(set(addresses)):
        threading.Thread(target=ask, args=[address], daemon=True).start()
    if listening is not None:
        threading.Thread(target=ask_those_that_dial, daemon=True).start()
    try:
        latest = _collect(answers, addresses, local, listening)
    finally:
        done.set()
    handshakes = [latest[a] for a in [*addresses, None] if isinstance(latest.get(a), dict)]
    if not handshakes:
        raise EnvError(f"no environment server can be used: {latest[addresses[0]]}")
    handshake = max(handshakes, key=handshakes.count)  # the first of the most frequent
    return handshake if listening is None else listening.group.share_first(handshake)


def answer_timeout(flags):
    """Return the seconds that environments may take to be made, reset or stepped."""
    return max(ANSWER_TIMEOUT, PATIENCE * flags.stall_timeout_s)


def check_handshake(handshake):
    """Return row_ranges of a server's environments; raise EnvError where it cannot be used."""
    num_envs, env, text = (handshake[key] for key in ("num_envs", "env", "spaces"))
    if num_envs > libtorchbeast.MAX_ENVS:
        raise EnvError(f"{num_envs:,} environments a stream, but {libtorchbeast.MAX_ENVS} is most")
    if not env.isprintable() or len(env) > MAX_NAME:
        raise EnvError(f"an environment whose name cannot be used: {env[:MAX_NAME]!r}")
    if not text:
        raise EnvError(
            "no spaces, from which the net is made (servers of forks name no spaces): serve the "
            "environment by create_env of polybeast_env.py"
        )
    return row_ranges(*spaces_from_json(text)[:2])


def _collect(answers, addresses, local, listening):
    """Return the latest answers by address, None of those that dial in; log who is waited for."""
    latest, start, deadline = {}, time.monotonic(), None
    line = None if local else start + FIRST_LINE  # when the log says so
    throttles = collections.defaultdict(Throttle)  # of addresses
    while deadline is None or time.monotonic() < deadline:
        if local is not None and not local.check():
            raise EnvError("the environment servers could not be started: see above")
        if line is not None and time.monotonic() > line:
            if addresses:
                logging.info("Waiting for environment servers at %s", ", ".join(addresses))
            if listening is not None:
                logging.info("Waiting for environments to dial in at %s", listening.address)
            line = time.monotonic() + DIAL_LINE if listening is not None else None
        if listening is not None and (shared := listening.group.share_first(None)) is not None:
            return {None: shared}
        try:
            address, answer = answers.get(timeout=0.1)
        except queue.Empty:
            continue
        latest[address] = answer
        if address is not None and listening is None:
            line = None
        if isinstance(answer, dict):
            deadline = deadline or time.monotonic() + (MAJORITY_TIMEOUT if addresses else 0)
        elif isinstance(answer, OSError):  # of which ours are, too
            advice = ""
            if isinstance(answer, TimeoutError) and local is None:
                advice = "; start polybeast_env.py there, or correct --server_addresses; if it is "
                advice += "there, compare the TLS flags of both ends (SECURITY.md)"
            seconds = time.monotonic() - start
            if throttles[address].count():
                logging.warning(
                    "Waiting for environments, %.0f s so far: %s%s", seconds, answer, advice
                )
        else:
            raise answer
        # Asking again would not help.
        final = (dict, ConnectionRefusedError, ConnectionAbortedError)
        if listening is None and len(latest) == len(set(addresses)):
            if all(isinstance(a, final) for a in latest.values()):
                break
    return latest
