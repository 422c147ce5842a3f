# SPDX-License-Identifier: Apache-2.0
"""MonoBeast's actor processes, the queues of buffers between, and the weights they are told."""

import argparse
import logging
import multiprocessing
import multiprocessing.forkserver
import os
import pathlib
import re
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import catch
import pytest
import torch

import actors
import experiment
import monobeast
from environment import Environments, map_nest
from experiment import FlagError

T = 20
DEADLINE = 30  # seconds; a loaded machine may need some, an idle one never


@pytest.fixture(scope="module")
def context():
    context = multiprocessing.get_context("forkserver")
    # Actors then start in a moment. (Our own files the server of Python 3.11 would not find.)
    context.set_forkserver_preload(["torch", "torch.utils.tensorboard", "gymnasium"])
    return context


def make_flags(**overrides):
    flags = argparse.Namespace(**{**vars(monobeast.parser.parse_args([])), "env": "Catch"})
    vars(flags).update({"num_actors": 1, "envs_per_actor": 2, "batch_size": 2, "seed": 7})
    vars(flags).update({"unroll_length": T, **overrides})
    monobeast.check_flags(flags)
    return flags


class Rig:
    """All that `train` builds around its actors, but no learner."""

    def __init__(self, context, **overrides):
        self.flags = flags = make_flags(**overrides)
        self.context = context
        torch.manual_seed(flags.seed)
        sample = Environments(lambda: catch.create_env(flags), 1, 0)
        self.model = catch.Net(sample.observation_space, sample.num_actions, flags.use_lstm)
        row = map_nest(lambda a: torch.from_numpy(a).unsqueeze(0), sample.initial())
        output, state = self.model(row, self.model.initial_state(1))
        self.buffers = monobeast.create_buffers(flags, row, output, state)
        self.weights = monobeast.PublishedWeights(self.model)
        self.processes = []  # all that were ever started, as (actor, process)
        self.heartbeats = torch.zeros(flags.num_actors, dtype=torch.float64).share_memory_()
        self.actors = monobeast.Actors(
            self.start, flags.num_actors, flags.envs_per_actor, flags.num_buffers,
            self.heartbeats, flags.stall_timeout_s,
        )  # fmt: skip
        wait_until(lambda: len(self.processes) >= flags.num_actors)

    def start(self, actor, incarnation, pipe):
        seed = [self.flags.seed, 1 + actor, incarnation, 0]
        process = self.context.Process(
            target=catch.act,
            args=(self.flags, actor, seed, pipe, self.buffers, self.weights, self.heartbeats),
            daemon=True,
        )
        process.start()
        self.processes.append((actor, process))
        return process

    def running(self, actor):
        """Return the process that is this actor now."""
        return [process for a, process in self.processes if a == actor][-1]

    def kill(self, actor):
        """Kill the actor, and wait until it is replaced."""
        process = self.running(actor)
        process.kill()
        wait_until(lambda: self.running(actor) is not process)

    def take(self, count):
        with ThreadPoolExecutor(1) as pool:
            taken = pool.submit(self.actors.take, count)
            try:
                return taken.result(DEADLINE)
            except TimeoutError:
                self.actors.close()  # or its thread would never end
                raise

    def rollouts(self, indices):
        """Return copies of these buffers."""
        return map_nest(lambda b: b[indices].clone(), self.buffers)

    def close(self):
        self.actors.close()
        for _, process in self.processes:
            if process.is_alive():
                process.kill()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(actors, "PAUSES", (0,))


@pytest.fixture
def make_rig(context):
    rigs = []

    def make(**overrides):
        rigs.append(Rig(context, **overrides))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def wait_until(condition, seconds=DEADLINE):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def collect(rig, count):
    """Return `count` rollouts in turn of all environments of the only actor, [N, T + 1, ...].

    The actor waits each time until new weights are published, so it is known with which it acted.
    """
    collected, published = [], {0: {k: v.clone() for k, v in rig.model.state_dict().items()}}
    for version in range(1, count + 1):
        indices = rig.take(rig.flags.envs_per_actor)
        collected.append(rig.rollouts(indices))
        with torch.no_grad():
            for parameter in rig.model.parameters():
                parameter += 0.05 * torch.randn(parameter.shape)
        rig.weights.publish(rig.model)
        published[version] = {k: v.clone() for k, v in rig.model.state_dict().items()}
        rig.actors.release(indices)
    return collected, published


@pytest.mark.parametrize("env", ["Echo", "Echo-truncated"])
def test_frames_rewards_and_actions_of_a_rollout_line_up(make_rig, env):
    rig = make_rig(env=env, num_buffers=3, batch_size=1)
    collected, _ = collect(rig, 3)
    length = catch.Echo().length
    for i in range(2):
        rows = {key: [] for key in collected[0]["rows"]}
        for k, rollout in enumerate(collected):
            for key, value in rollout["rows"].items():
                rows[key] += value[i, min(k, 1) :].tolist()  # row 0 again is tested elsewhere
        episode = step = total = 0
        ended = reset = False
        assert rows["done"][0] and rows["frame"][0] == [0, 0, 0]
        for t in range(1, 3 * T + 1):
            row = {key: value[t] for key, value in rows.items()}
            before = {key: value[t - 1] for key, value in rows.items()}
            if ended:  # an extra row has shown the end; this one adds nothing
                assert row["reward"] == 0 and row["done"] and not row["truncated"]
                assert row["last_action"] == before["last_action"]
                assert row["episode_return"] == total and row["episode_step"] == length
                reset, ended = True, False
            else:
                step, total = step + 1, total + step + 1
                assert row["reward"] == step
                assert row["last_action"] == row["action"]
                assert row["episode_return"] == total and row["episode_step"] == step
                ended = step == length and env == "Echo-truncated"
                reset = step == length and not ended
                assert row["truncated"] == ended and row["done"] == reset
            if reset:
                episode, step, total, reset = episode + 1, 0, 0, False
            # What the environment says itself of where it is and what it was told last.
            assert row["frame"] == [episode, step, row["last_action"]]
            assert not row["terminated"]
        assert episode >= 5
        assert len(set(rows["action"][1:])) == 3


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("use_lstm", [False, True], ids=["feed-forward", "lstm"])
def test_rollouts_hold_what_the_model_answered_with_the_weights_of_their_version(
    make_rig, use_lstm, precision
):
    rig = make_rig(env="Echo", use_lstm=use_lstm, num_buffers=3, batch_size=1, precision=precision)
    # In batches of other sizes, bfloat16 rounds otherwise.
    tolerance = {"rtol": 0.05, "atol": 0.02} if precision == "bf16" else {}
    collected, published = collect(rig, 4)
    model = catch.Net(catch.Echo().observation_space, 3, use_lstm)
    last_rows = next_state = None
    for k, rollout in enumerate(collected):
        # The third buffer is free, but it takes two at a time: no rollout was begun before.
        assert rollout["policy_version"].tolist() == [k, k]
        rows = map_nest(lambda x: x.transpose(0, 1), rollout["rows"])  # [T + 1, N, ...]
        state = tuple(
            torch.cat(list(s), dim=1)  # of [N, layers, 1, hidden]
            for s in rollout["initial_agent_state"]
        )
        if k == 0:
            assert not any(s.any() for s in state)
        else:
            for key in rows:
                assert torch.equal(rows[key][0], last_rows[key]), key
            for s, expected in zip(state, next_state, strict=True):
                torch.testing.assert_close(s, expected, **tolerance)
        model.load_state_dict(published[k])
        with torch.no_grad(), monobeast.autocast(rig.flags, torch.device("cpu")):
            outputs, next_state = monobeast.to_float32(
                model(map_nest(lambda x: x[:-1], rows), state)
            )
        # The answer to a row stands in the next one, beside what came of it.
        for key in ("policy_logits", "baseline"):
            torch.testing.assert_close(rows[key][1:], outputs[key], **tolerance)
            in_bf16 = torch.equal(rows[key], rows[key].bfloat16().float())
            assert in_bf16 == (precision == "bf16")
        last_rows = map_nest(lambda x: x[-1], rows)
    assert len(state) == (2 if use_lstm else 0)
    assert all(s.any() for s in state)


def test_no_rollout_is_begun_before_there_are_buffers_for_all_environments(make_rig):
    rig = make_rig(envs_per_actor=2, num_buffers=4)
    indices = rig.take(4)
    rig.actors.release(indices[:1])
    time.sleep(0.3)
    assert rig.actors.num_full() == 0
    rig.actors.release(indices[1:])
    assert sorted(rig.take(4)) == [0, 1, 2, 3]


def take_and_release_all(rig, times=2):
    """Every index comes back full, once: none was lost, none is there twice."""
    M = rig.flags.num_buffers
    for _ in range(times):
        indices = rig.take(M)
        assert sorted(indices) == list(range(M))
        rig.actors.release(indices)


def test_actor_killed_while_it_waits_for_free_buffers_locks_nobody_out(make_rig):
    rig = make_rig(num_actors=3, num_buffers=8)
    wait_until(lambda: rig.actors.num_full() == 8)  # so all of them wait
    waited = rig.actors.seconds_waited()
    time.sleep(0.2)
    assert rig.actors.seconds_waited() >= waited + 2 * 0.2  # one may have only begun to
    waited = rig.actors.seconds_waited()
    rig.kill(1)
    take_and_release_all(rig)
    assert rig.actors.seconds_waited() >= waited


def test_all_actors_killed_while_they_wait_are_replaced(make_rig):
    rig = make_rig(num_actors=2, num_buffers=6)
    wait_until(lambda: rig.actors.num_full() == 6)
    for actor in (0, 1):
        rig.running(actor).kill()
    wait_until(lambda: len(rig.processes) == 4)
    take_and_release_all(rig, 3)


def test_actor_killed_in_the_middle_of_a_rollout_loses_no_buffer(make_rig, tmp_path, caplog):
    # The first environment to reach its 25th step, in a second rollout, sleeps for an hour.
    marker = tmp_path / "marker"
    rig = make_rig(env=f"Failing-hang:{marker}", num_actors=2, num_buffers=8)
    wait_until(lambda: marker.exists() and marker.read_text().endswith("\n"))
    (actor,) = [a for a, p in rig.processes if p.pid == int(marker.read_text())]
    for _ in range(5):  # the other one goes on meanwhile
        rig.actors.release(rig.take(2))
    rig.kill(actor)
    take_and_release_all(rig, 3)
    assert f"Actor {actor} died and is started anew" in caplog.text
    assert "killed by SIGKILL" in caplog.text
    assert rig.actors.num_restarts == 1


def test_actor_killed_right_after_it_gave_full_buffers_loses_none_of_them(make_rig):
    rig = make_rig(num_actors=2, num_buffers=8)
    for k in range(4):
        held = rig.take(2)
        rig.kill(k % 2)
        rig.actors.release(held)
        take_and_release_all(rig, 1)


def test_actors_killed_time_and_again_at_any_moment_lose_no_buffer(make_rig):
    rig = make_rig(num_actors=3, num_buffers=8, unroll_length=5)
    for k in range(9):
        for _ in range(7 * k % 5):
            rig.actors.release(rig.take(2))
        rig.kill(k % 3)
    take_and_release_all(rig, 3)
    assert rig.actors.num_restarts == 9


def test_an_environment_that_always_raises_ends_the_run_with_its_traceback(make_rig, caplog):
    caplog.set_level(logging.INFO)
    rig = make_rig(env="Failing-raise", num_actors=2)

    def take_all():
        while (indices := rig.actors.take(1)) is not None:
            rig.actors.release(indices)
        return "closed"

    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(take_all)
        try:
            assert taking.result(2 * DEADLINE) == "closed"
        finally:
            rig.actors.close()
    with pytest.raises(RuntimeError, match=rf"died {actors.MAX_DEATHS} times") as raised:
        rig.actors.check()
    for text in (caplog.text, str(raised.value)):
        assert "Traceback (most recent call last)" in text
        assert 'raise ValueError("the game is broken")' in text
        assert ": environment 0 (" in text and ", step 25: " in text
        assert "EnvError: actor " in text
    deaths = [sum(a == actor for a, _ in rig.processes) for actor in range(2)]
    assert min(deaths) == actors.MAX_DEATHS  # the last one is not replaced


def test_one_actor_that_always_fails_does_not_end_the_run_of_the_others(make_rig):
    rig = make_rig(num_actors=2)
    take_and_release_all(rig, 2)

    def dies_once_more(count):
        rig.actors.release(rig.take(rig.actors.num_full()))  # so that the other one goes on
        return rig.actors.num_restarts == count

    for count in range(1, actors.MAX_DEATHS + 3):
        rig.kill(0)
        wait_until(lambda count=count: dies_once_more(count))
    take_and_release_all(rig, 2)
    rig.actors.check()


def test_an_actor_that_cannot_even_start_ends_the_run(make_rig):
    rig = make_rig()
    rig.flags.env = "Catch of the day"  # from the first restart on
    wait_until(lambda: rig.actors.num_full() > 0)
    rig.running(0).kill()
    assert rig.take(rig.flags.num_buffers + 1) is None
    with pytest.raises(RuntimeError, match="KeyError: 'Catch of the day'"):
        rig.actors.check()


def test_close_unblocks_take(make_rig):
    rig = make_rig(num_buffers=4)
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(rig.actors.take, 5)  # more than there are
        try:
            wait_until(lambda: rig.actors.num_full() == 4)
            time.sleep(0.1)
            assert not taken.done()
        finally:
            rig.actors.close()
        assert taken.result(DEADLINE) is None
    assert rig.actors.take(1) is None
    rig.actors.check()  # to close is no error


def test_close_ends_all_processes_and_may_be_called_twice(make_rig):
    rig = make_rig(num_actors=3)
    rig.take(2)
    rig.kill(2)
    rig.actors.close()
    assert len(rig.processes) == 4
    assert [process for _, process in rig.processes if process.is_alive()] == []
    rig.actors.close()
    rig.actors.release([0])  # by a learner that comes too late


def test_an_actor_ends_by_itself_when_asked(make_rig):
    rig = make_rig()
    rig.take(2)
    rig.actors.close()
    assert rig.running(0).exitcode == 0  # and was not killed


def test_close_may_be_called_by_several_threads_at_once(make_rig):
    rig = make_rig()
    rig.take(1)
    with ThreadPoolExecutor(4) as pool:
        for closing in [pool.submit(rig.actors.close) for _ in range(4)]:
            closing.result(DEADLINE)
    assert not rig.running(0).is_alive()


def test_close_ends_an_actor_that_hangs_in_its_environment(make_rig, tmp_path):
    marker = tmp_path / "marker"
    rig = make_rig(env=f"Failing-hang:{marker}", num_actors=2)
    wait_until(lambda: marker.exists())
    start = time.monotonic()
    rig.actors.close()
    assert time.monotonic() < start + 10
    assert [process for _, process in rig.processes if process.is_alive()] == []


def test_a_process_that_cannot_be_started_does_not_keep_the_others_from_running_or_ending(
    context, caplog, monkeypatch
):
    monkeypatch.setattr(actors, "PAUSES", (0.01,))
    started = []

    def start(actor, incarnation, pipe):
        if actor == 2:
            raise BlockingIOError("no more processes")
        process = context.Process(target=wait_for_end_of_pipe, args=(pipe,), daemon=True)
        process.start()
        started.append(process)
        return process

    try:
        pool = actors.Actors(start, 3, 1, 3, torch.zeros(3), 60)
        wait_until(lambda: pool.num_restarts > actors.MAX_DEATHS and len(started) == 2)
        assert "could not be started (BlockingIOError('no more processes')" in caplog.text
        pool.check()
        assert all(process.is_alive() for process in started)
        pool.close()
        for process in started:
            process.join(10)
            assert not process.is_alive()
    finally:
        for process in started:
            process.kill()


def wait_for_end_of_pipe(pipe):
    pipe.poll(None)


def test_close_right_after_the_start_ends_actors_that_still_start(make_rig):
    rig = make_rig(num_actors=4)
    rig.actors.close()
    assert [process for _, process in rig.processes if process.is_alive()] == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_actors_leave_it_to_the_main_process_to_stop(make_rig, number):
    rig = make_rig()  # Ctrl-C reaches the whole process group
    rig.take(1)
    os.kill(rig.running(0).pid, number)
    rig.actors.release([0])
    take_and_release_all(make_rig(), 1)
    assert rig.actors.num_restarts == 0


def test_shared_memory_is_gone_after_the_end(context):
    def names():
        return set(os.listdir("/dev/shm"))

    before = names()
    rig = Rig(context)
    try:
        rig.take(1)
        rig.kill(0)
    finally:
        rig.close()
    wait_until(lambda: names() <= before)  # other programs make some, too, for a moment


def test_seeds_reach_environments_and_sampling_of_each_actor(make_rig):
    def first_rollouts(rig):
        indices = rig.take(rig.flags.envs_per_actor)
        return rig.rollouts(indices)["rows"]

    one, same, other = [first_rollouts(make_rig(seed=seed)) for seed in (1, 1, 2)]
    for key in one:
        assert torch.equal(one[key], same[key]), key
    for key in ("frame", "action"):
        assert not torch.equal(one[key], other[key]), key
        assert not torch.equal(one[key][0], one[key][1]), key  # of its two environments

    # Both actors have the same model, so what differs is what they sample and what they see.
    rig = make_rig(seed=1, num_actors=2, num_buffers=6)
    indices = rig.take(6)
    rollouts = rig.rollouts(indices)["rows"]
    assert len({action.numpy().tobytes() for action in rollouts["action"]}) == 6
    assert len({frame.numpy().tobytes() for frame in rollouts["frame"]}) == 6


def first_batch_of_training(monkeypatch, tmp_path, seed):
    """Train until the first batch has come, and return it."""
    batches = []

    def learn(flags, model, batch, initial_agent_state, optimizer):
        batches.append(map_nest(torch.clone, batch))
        optimizer.step()  # of no gradient
        return {"steps": flags.total_steps}

    monkeypatch.setattr(monobeast, "learn", learn)
    # One actor and batches of all its environments: it is known what comes first.
    arguments = "--env Catch --num_actors 1 --envs_per_actor 4 --batch_size 4 --total_steps 1"
    arguments += f" --seed {seed} --xpid seed{seed}-{time.monotonic_ns()} --savedir {tmp_path}"
    assert monobeast.main(arguments.split()) == 0
    return batches[0]


def test_seed_of_the_command_line_reaches_environments_sampling_and_model(monkeypatch, tmp_path):
    one, same, other = [first_batch_of_training(monkeypatch, tmp_path, seed) for seed in (1, 1, 2)]
    for key in one:
        assert torch.equal(one[key], same[key]), key
    for key in ("frame", "action", "policy_logits"):
        assert not torch.equal(one[key], other[key]), key


def weights_of_version(model, version):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(version)


def make_model():
    return torch.nn.Sequential(*[torch.nn.Linear(300, 300) for _ in range(6)])


def read_weights(weights, pipe):
    """Load weights many times; tell how often they were torn, and of how many versions."""
    torch.set_num_threads(1)
    model, versions, torn = make_model(), [], 0
    for _ in range(400):
        versions.append(weights.load_into(model))
        torn += not all((p == versions[-1]).all() for p in model.parameters())
    assert versions == sorted(versions)
    pipe.send((torn, len(set(versions))))


def test_published_weights_are_never_torn(context):
    model = make_model()
    weights_of_version(model, 0)
    weights = monobeast.PublishedWeights(model)
    pipes, processes = [], []
    try:
        for _ in range(2):
            pipe, far_end = context.Pipe()
            processes.append(
                context.Process(target=read_weights, args=(weights, far_end), daemon=True)
            )
            processes[-1].start()
            far_end.close()
            pipes.append(pipe)
        deadline = time.monotonic() + 2 * DEADLINE
        while not all(pipe.poll() for pipe in pipes):
            assert time.monotonic() < deadline
            weights_of_version(model, weights.version + 1)
            weights.publish(model)  # as fast as it goes
        for pipe in pipes:
            torn, num_versions = pipe.recv()
            assert torn == 0
            assert num_versions > 10
    finally:
        for process in processes:
            process.kill()
            process.join()


class Interrupted:
    """Slots of weights; while one is read for the first time, something else happens."""

    def __init__(self, slots, interruption):
        self.slots, self.interruption = slots, interruption

    def __setitem__(self, key, value):
        self.slots[key] = value

    def __getitem__(self, key):
        half = self.slots.shape[1] // 2
        first = self.slots[key, :half].clone()
        interruption, self.interruption = self.interruption, lambda: None
        interruption()
        return torch.cat([first, self.slots[key, half:]])


@pytest.mark.parametrize("count", [1, 2, 3])
def test_weights_published_while_they_are_read_are_read_again(count):
    model, reader = make_model(), make_model()
    weights_of_version(model, 0)
    weights = monobeast.PublishedWeights(model)

    def publish():
        for version in range(1, count + 1):
            weights_of_version(model, version)
            weights.publish(model)

    weights._slots = Interrupted(weights._slots, publish)
    version = weights.load_into(reader)
    assert all((p == version).all() for p in reader.parameters())
    assert version == count


def test_weights_of_several_types_are_published():
    model = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.BatchNorm1d(1))
    other = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.BatchNorm1d(1))
    model(torch.randn(5, 3))  # which counts the batches, in an integer
    weights = monobeast.PublishedWeights(model)
    weights.load_into(other)
    for (key, one), two in zip(
        model.state_dict().items(), other.state_dict().values(), strict=True
    ):
        assert torch.equal(one, two), key


def test_weights_have_a_version_that_counts_publications(context):
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    weights = monobeast.PublishedWeights(model)
    for version in range(4):
        assert weights.version == version
        assert weights.load_into(other) == version
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q)
        weights_of_version(model, version + 10)
        weights.publish(model)


def test_buffers_have_one_shared_tensor_a_key(make_rig):
    rig = make_rig(use_lstm=True, num_buffers=7)
    rows = rig.buffers["rows"]
    assert rows["frame"].shape == (7, T + 1, 1, 10, 5) and rows["frame"].dtype == torch.uint8
    assert rows["policy_logits"].shape == (7, T + 1, 3)
    assert rows["action"].dtype == rows["last_action"].dtype == torch.int64
    for key in ("reward", "episode_return", "policy_logits", "baseline"):
        assert rows[key].dtype == torch.float32, key
    for key in ("done", "truncated", "terminated"):
        assert rows[key].dtype == torch.bool, key
    assert [s.shape for s in rig.buffers["initial_agent_state"]] == [(7, 1, 1, 64)] * 2
    map_nest(lambda b: b.is_shared() or pytest.fail("not shared"), rig.buffers)


def test_too_few_buffers_are_refused_with_the_numbers():
    with pytest.raises(FlagError, match=r"num_buffers is 39, .* 4 x 8 .* = 8 .* at least 40"):
        make_flags(num_actors=4, envs_per_actor=8, batch_size=8, num_buffers=39)
    assert make_flags(num_actors=4, envs_per_actor=8, batch_size=8, num_buffers=40)


@pytest.mark.parametrize(
    "name",
    ["num_actors", "envs_per_actor", "batch_size", "unroll_length", "num_learner_threads"],
)
def test_counts_must_be_positive(name):
    with pytest.raises(FlagError, match=f"--{name} is 0"):
        make_flags(**{name: 0})


def test_too_little_shared_memory_is_found_before_any_is_used(monkeypatch):
    flags = make_flags(num_buffers=1000)
    usage = shutil.disk_usage("/dev/shm")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2**20))
    sample = Environments(lambda: catch.create_env(flags), 1, 0)
    row = map_nest(lambda a: torch.from_numpy(a).unsqueeze(0), sample.initial())
    monkeypatch.setattr(
        torch.Tensor, "share_memory_", lambda _: pytest.fail("memory was taken all the same")
    )
    # 21 rows a buffer, each of 50 bytes of frame and 32 of the rest.
    with pytest.raises(FlagError, match=r"need 2 MiB .* has 1 MiB left: .*--num_buffers \(1000\)"):
        monobeast.create_buffers(flags, row, {}, ())


def test_the_end_of_the_parent_ends_an_actor(context, tmp_path):
    # The parent is a process of its own, killed without a word to its actor.
    pid_file = tmp_path / "pid"
    parent = context.Process(target=be_a_parent, args=(str(pid_file),))
    parent.start()
    try:
        wait_until(lambda: pid_file.exists() and pid_file.read_text().endswith("\n"))
        child = int(pid_file.read_text())
        assert pathlib.Path(f"/proc/{child}").exists()
    finally:
        parent.kill()
        parent.join()
    wait_until(lambda: not is_running(child))


def be_a_parent(path):
    child = multiprocessing.get_context("fork").Process(target=be_a_child)
    child.start()
    pathlib.Path(path).write_text(f"{child.pid}\n")
    time.sleep(3600)


def be_a_child():
    threading.Thread(target=monobeast.end_with_parent, daemon=True).start()
    time.sleep(3600)


def is_running(pid):
    try:
        status = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")


def test_stop_signals_are_those_of_the_experiment():
    assert experiment.STOP_SIGNALS == (signal.SIGINT, signal.SIGTERM)


def test_an_actor_that_dies_time_and_again_but_gives_rollouts_does_not_end_the_run(make_rig):
    rig = make_rig(num_actors=1, num_buffers=8)
    for _ in range(actors.MAX_DEATHS + 2):
        for _ in range(actors.MIN_ROLLOUTS + 8 // 2):  # those before the last death included
            rig.actors.release(rig.take(rig.flags.envs_per_actor))
        rig.kill(0)
    take_and_release_all(rig, 2)
    assert rig.actors.num_restarts == actors.MAX_DEATHS + 2


@pytest.mark.parametrize("how", ["stopped", "hangs"])
def test_a_silent_actor_is_replaced(make_rig, tmp_path, caplog, how):
    marker = tmp_path / "marker"
    env = f"Failing-hang:{marker}" if how == "hangs" else "Catch"
    rig = make_rig(env=env, num_actors=2, stall_timeout_s=0.5)
    if how == "stopped":
        os.kill(rig.running(0).pid, signal.SIGSTOP)

    def is_replaced():
        rig.actors.release(rig.take(rig.actors.num_full()))  # so that it has something to do
        return rig.actors.num_restarts > 0

    wait_until(is_replaced)
    assert re.search(r"Actor \d died .* it was silent for \d+ s, and so was killed", caplog.text)
    take_and_release_all(rig, 2)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_run_goes_on_without_its_fork_server(make_rig, number):
    rig = make_rig(num_actors=2)
    take_and_release_all(rig, 1)
    os.kill(multiprocessing.forkserver._forkserver._forkserver_pid, number)
    rig.running(0).kill()  # its end is told by the fork server, and so is its successor's start
    wait_until(lambda: rig.actors.num_restarts > 0 and len(rig.processes) > 2)
    take_and_release_all(rig, 3)


def test_close_does_not_wait_for_a_fork_server_that_is_stopped(make_rig):
    rig = make_rig(num_actors=2)
    os.kill(multiprocessing.forkserver._forkserver._forkserver_pid, signal.SIGSTOP)
    for actor in range(2):
        os.kill(rig.running(actor).pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(rig.actors.close).result(DEADLINE)
    assert [process for _, process in rig.processes if process.is_alive()] == []


def test_an_actor_that_waits_for_buffers_is_not_silent(make_rig):
    rig = make_rig(num_actors=2)
    wait_until(lambda: rig.actors.num_full() == rig.flags.num_buffers)
    wait_until(lambda: [s for s in rig.actors.silences() if s[0].startswith("actor ")] == [])
    rig.heartbeats.fill_(time.monotonic() - 100 * rig.flags.stall_timeout_s)
    time.sleep(3)  # in which the watcher looks after them
    assert rig.actors.num_restarts == 0
    take_and_release_all(rig, 2)
    assert rig.actors.num_restarts == 0
