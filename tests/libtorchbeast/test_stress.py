# SPDX-License-Identifier: Apache-2.0
"""Pools, queues, batchers, servers and listeners, which many threads open, use and close at random.

For STRESS_SECONDS (in the environment), else 3. The core alone: csrc/tests/stress_test.cc.
"""

import contextlib
import gc
import logging
import os
import pathlib
import random
import socket
import threading
import time

import pytest
from counting import Counting, Truncated
from deadline import DEADLINE, Thread, run_with_deadline, wait_until
from rig import Rig, check_rows, split
from stream import ServerThread

from libtorchbeast import ClosedBatchingQueue, Dialer, Listener

pytestmark = pytest.mark.whole

SECONDS = float(os.environ.get("STRESS_SECONDS", 3))
PLAYERS = 3  # at once


@pytest.mark.timeout(SECONDS + 3 * DEADLINE, method="thread")
def test_whoever_ends_first_all_end_and_nothing_stays(tmp_path):
    here = str(pathlib.Path(__file__).parent)
    code = f"sys.path.insert(0, {here!r}); import test_stress; "
    code += f"test_stress.stress({SECONDS}, {str(tmp_path)!r})"
    print(run_with_deadline(code, SECONDS + 2 * DEADLINE))


def stress(seconds, folder):
    """Play rounds; to be called in a process of its own, in which nothing else is opened."""
    logging.disable()  # of dialers, whose learners end
    for number in range(PLAYERS):
        play(folder, random.Random(number))  # what gRPC keeps for good is there after that
    threads, descriptors = census()
    end, has_lost = time.monotonic() + seconds, threading.Event()
    players = [Thread(play_until, end, has_lost, folder, n) for n in range(PLAYERS)]
    results = [player.result(seconds + DEADLINE) for player in players]
    rounds, columns, losses = (sum(numbers) for numbers in zip(*results, strict=True))
    assert columns > rounds / 2
    # One thread or descriptor a round would be many more: some of gRPC's threads come and go by
    # themselves, and a socket stays open in about 500 rounds, which looks like gRPC 1.51's doing.
    wait_until(lambda: census()[0] <= threads + 8 and census()[1] <= descriptors + 8 + rounds / 100)
    assert not os.listdir(folder), "a socket has stayed"
    print(f"{rounds} rounds, {columns} columns, {losses} ended by a lost server; threads and "
          f"descriptors: {threads}, {descriptors} at first, {census()} now")  # fmt: skip


def census():
    gc.collect()
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def play_until(end, has_lost, folder, number):
    """Play until that time, and on until a lost server has ended a round of some player."""
    rng = random.Random(f"player {number}")
    results = []
    while time.monotonic() < end or not has_lost.is_set():
        results.append(play(folder, rng))
        if results[-1][1]:
            has_lost.set()
    columns, losses = (sum(numbers) for numbers in zip(*results, strict=True))
    return len(results), columns, losses


def play(folder, rng):
    """Play one round; return how many columns came, and whether a lost server ended it."""
    if rng.random() < 0.5:
        return play_with_a_listener(rng), False
    dict_outputs, reconnect = rng.random() < 0.5, rng.random() < 0.5
    truncates = dict_outputs and rng.random() < 0.5  # forks do not know of truncation
    env_class = Truncated if truncates else Counting
    addresses = [f"unix:{folder}/{rng.getrandbits(64):x}" for _ in range(rng.randint(1, 2))]
    servers = [ServerThread(env_class, address) for address in addresses]
    options = {"limit": rng.choice([None, 4]), "num_envs": rng.randint(1, 3)}
    options |= {"dict_outputs": dict_outputs, "reconnect": reconnect}
    rig = Rig(addresses * rng.randint(1, 2), **options)
    learners = [Thread(learn, rig, truncates) for _ in range(rng.randint(1, 2))]
    try:
        time.sleep(rng.choice([0, 0.02, 0.2]) * rng.random())
        stops_server = rng.random() < 0.5
        if stops_server:
            servers[0].stop()
            servers[0] = ServerThread(env_class, addresses[0])  # another one, at the same address
            time.sleep(0.3 * rng.random())
        first, second = rng.sample([rig.queue, rig.batcher], 2)
        closing = Thread(first.close)
        if rng.random() < 0.5:
            second.close()
        closing.result()
    finally:
        try:
            rig.close()
            lost = False
        except ConnectionError:
            assert stops_server and not reconnect
            lost = True
        for server in servers:
            server.stop()
    return sum(learner.result() for learner in learners), lost


def play_with_a_listener(rng):
    """Play one round with streams that come and go; return how many columns came."""
    with socket.create_server(("127.0.0.1", 0)) as port:
        listener = Listener(port.fileno(), rng.choice([1, 2, 20]))
        address = f"127.0.0.1:{port.getsockname()[1]}"
        options = {"limit": rng.choice([None, 4]), "num_envs": rng.randint(1, 3)}
        asking = Thread(ask, listener) if rng.random() < 0.5 else None
        rig = Rig([], listener=listener, dict_outputs=True, **options)
        learner = Thread(learn, rig, False)
        dialers, threads = [], []
        for _ in range(rng.randint(1, 6)):
            dialers.append(Dialer(Counting, [address]))
            threads.append(Thread(dialers[-1].run))
            time.sleep(rng.choice([0, 0.02, 0.2]) * rng.random())
            if rng.random() < 0.3:
                rng.choice(dialers).stop()
        time.sleep(0.5 * rng.random())
        closables = [listener, rng.choice([rig.queue, rig.batcher])]
        for closing in [Thread(c.close) for c in rng.sample(closables, rng.randint(1, 2))]:
            closing.result()
        rig.close()
        closing = [Thread(listener.close) for _ in range(2)]
        for thread in closing + ([asking] if asking else []):
            thread.result()
        assert listener.num_streams() == 0
        for dialer, thread in zip(dialers, threads, strict=True):
            dialer.stop()
            thread.result()
        return learner.result()


def ask(listener):
    with contextlib.suppress(ClosedBatchingQueue, ConnectionError):
        listener.query(1)


def learn(rig, truncates):
    """Check all rollouts until the end; return how many columns there were."""
    columns = [column for batch in rig.queue for column in split(batch)]
    for column in columns:
        check_rows(*column, truncates)
    return len(columns)
