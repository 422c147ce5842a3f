# SPDX-License-Identifier: Apache-2.0
"""A column of a learner's batch for a program that owns its loop: a simulator, a network stack.

    with EnvClient("learner:50050", observation_space, action_space) as client:
        action = client.reset(observation)
        while True:
            ...
            action = client.step(observation, reward, terminated, truncated)
            if action is None:  # the episode has ended
                action = client.reset(observation)

A clock that does not wait for the learner calls `observe` and `poll` instead, at any pace:

    client.observe(observation, reward, terminated, truncated)
    action = client.poll()  # None: the action in force stays in force

An action takes effect when `poll` returns it. The first `observe` after that sends a row to the
learner: `last_action` is the action in force, the reward is the sum of all since the row before. So
where an action comes late, several calls of `observe` make one row, and what the action before has
earned meanwhile counts for the row in which the new one took effect (the learner should have
--reward_clipping none). After an end, `observe` begins the next episode:

- An action that comes after the end takes effect in the next episode. The row that ends the old one
  names it all the same: the learner chose it in that episode.
- Rewards of an episode before its first row count for its second; of a stream's first episode
  they are left out.
- An episode that ends before its first row could be sent is left out.

`reset` instead waits for an action of the new episode; one that comes after the end has no effect.

From one row to the next, so from an end to the next episode, too, at most 300 s may pass, or five
times the learner's --stall_timeout_s if that is more. Else the learner takes the stream for lost,
and with it the end and the rewards since its last whole rollout.

The learner: polybeast.py --listen ADDRESS --envs_per_stream 1. Needs numpy, grpcio and protobuf.
"""

import queue
import threading

from libtorchbeast import rpcenv_pb2, wire
from libtorchbeast.access import split_address
from libtorchbeast.dialer import Dialer
from libtorchbeast.rows import Rows, read_step, write_observation
from libtorchbeast.spaces import space_to_dict, spaces_to_json, to_action, zero_observation

ENDED = None  # what a stream is told to end, and the client once it has


class EnvClient:
    """Dials in to a learner as one environment. For one thread, except for `close`.

    Args:
      address: host:port of the learner. It need not be there yet.
      observation_space, action_space: of Gymnasium; or dicts, as spaces.py has them.
      env: the name of what is played, which the learner compares; may be empty.
      reconnect: when the learner is lost, dial again; the rest of the episode then counts as a new
        one. Else ConnectionError is raised.
      tls: PEM texts of the authority that signed the learner's certificate, of our own certificate
        and of its key.
      auth_token: the token that the learner asks for.

    Whatever waits for actions, and `poll`, raises ConnectionError when there will be none: the
    learner has refused us; or it was lost, and we are not to reconnect; or `close` was called.
    """

    num_envs, stack_size = 1, 0  # for RowEncoder

    def __init__(
        self, address, observation_space, action_space, *,
        env="", reconnect=True, tls=None, auth_token=None,
    ):  # fmt: skip
        split_address(address)
        self.spaces = spaces_to_json(observation_space, action_space, 1)
        self._observation_space = space_to_dict(observation_space)
        self._action_space = space_to_dict(action_space)
        try:
            frame = zero_observation(self._observation_space)
            is_box = self._action_space["type"] == "Box"
            action = zero_observation(self._action_space).astype("f4" if is_box else "i8")
            to_action(self._action_space, action[0])
        except (KeyError, TypeError) as error:
            raise ValueError(f"the spaces {self.spaces} cannot be used: {error!r}") from None
        self._env = env

        # Of the user's thread: what it has seen, and what the learner knows of it.
        self._events = queue.SimpleQueue()  # from the stream: see _next_action
        self._stream = None  # the one that is open
        self._is_asked = False  # the learner waits for a row: its last action is in force
        self._is_running = False  # an episode is
        self._is_known = False  # the learner has the first row of this episode
        self._frame = frame  # the newest one
        self._reward = 0.0  # of this episode since the last row
        self._end = None  # of an episode: reward, whether it was truncated, the last frame
        self._rows = Rows(1, last_action=action)

        self._newest = None  # stream, whichever thread has it
        self._is_closed = False
        self._dialer = Dialer(
            None, [address], tls=tls, auth_token=auth_token, play=self._play, reconnect=reconnect
        )
        self._thread = threading.Thread(target=self._dial, name="EnvClient", daemon=True)
        self._thread.start()

    def reset(self, observation):
        """Begin an episode; wait for the learner's first action in it, and return that."""
        if self._is_running:
            raise RuntimeError("the episode has not ended: step() or observe() has to say so first")
        self.observe(observation)
        while True:
            action = self._next_action(wait=True)
            if self._is_known:
                return action
            self._advance()  # it was still due when the last episode ended

    def step(self, observation, reward, terminated=False, truncated=False):
        """Wait for the learner's next action, and return that; None at an end.

        Args:
          observation: to which the last action led. At a termination it is ignored.
          terminated: the episode is over.
          truncated: it was cut (a time limit), and the value of the observation counts.
        """
        if not self._is_running:
            raise RuntimeError("no episode is running: call reset() first")
        self.observe(observation, reward, terminated, truncated)
        return self._next_action(wait=True) if self._is_running else None

    def observe(self, observation, reward=0.0, terminated=False, truncated=False):
        """Say what there is to see now, and the reward since the last call. Does not wait.

        Args: as of step.
        """
        reward, terminated, truncated, _ = read_step(reward, terminated, truncated, {})
        frame = self._frame
        if not terminated:
            frame = zero_observation(self._observation_space) if truncated else frame
            write_observation(frame, 0, observation, "as its space says")
        self._reward += reward
        self._is_running = not (terminated or truncated)
        if not self._is_running:
            if self._is_known:
                truncated = truncated and not terminated and self._stream.truncated_rows
                self._end = self._reward, truncated, frame
            self._reward, self._is_known = 0.0, False
        self._advance()

    def poll(self):
        """Return an action that has come since the last call, or None. Does not wait."""
        return self._next_action(wait=False)

    def close(self):
        """Leave the learner. Calls that wait raise ConnectionError. For any thread."""
        self._is_closed = True
        self._dialer.stop()
        if self._newest is not None:
            self._newest.steps.put(ENDED)
        self._events.put("the client is closed")
        self._thread.join()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _next_action(self, wait):
        while True:
            try:
                event = self._events.get(wait)
            except queue.Empty:
                return None
            if isinstance(event, str):  # why there will be no more
                self._events.put(event)  # for the next call, too
                raise ConnectionError(event)
            if isinstance(event, tuple):  # an action, as agents choose it and as the space has it
                last_action, action = event
                self._is_asked = True
                # The one that answers the extra row after a truncation is ignored.
                if not self._rows.at_end[0]:
                    self._rows.row["last_action"][:] = last_action
                    return action
            else:  # a new stream, or the open one has ended
                self._stream, self._is_asked = event, event is not ENDED
                self._end, self._is_known = None, False
            self._advance()

    def _advance(self):
        """Send a row, if the learner waits for one and there is one."""
        stream, rows, frame = self._stream, self._rows, self._frame
        is_truncated = self._end is not None and self._end[1]
        if not self._is_asked or not (self._is_running or is_truncated):
            return
        if stream.is_new:
            rows.restart()
            self._reward = 0.0  # what nobody has seen the beginning of
        elif rows.at_end[0]:
            rows.begin(0)
        elif self._end is not None:
            reward, _, last_frame = self._end
            rows.step(0, reward, not is_truncated, is_truncated, True)
            frame, self._end = last_frame if is_truncated else frame, None
        else:
            rows.step(0, self._reward, False, False, False)
            self._reward = 0.0
        self._is_known, self._is_asked = not is_truncated, False
        stream.send(rows.row | {"frame": frame})

    def _dial(self):
        """Have streams until there will be no more: a thread."""
        try:
            self._dialer.run()
        except Exception as error:
            self._events.put(str(error) or repr(error))

    def _play(self, options, requests, address):
        """Yield serialized Steps that the user's thread has sent, in a thread of gRPC's."""
        if options.num_envs not in (None, 1):
            reason = (
                f"the learner at {address} asks for {options.num_envs} environments a stream, but "
                "an EnvClient is only one: start the learner with --envs_per_stream 1"
            )
            self._dialer.give_up(reason)
            yield rpcenv_pb2.Step(error=reason).SerializeToString()
            return
        stream = self._newest = _Stream(self, options.truncated_rows)
        decoder = wire.ActionDecoder(1, self._rows.row["last_action"])
        if self._is_closed:
            return
        self._events.put(stream)
        try:
            while (step := stream.steps.get()) is not ENDED:
                yield step
                request = next(requests, None)
                if request is None:
                    return
                actions = decoder.decode(request)
                self._events.put((actions, to_action(self._action_space, actions[0])))
        finally:
            self._events.put(ENDED)


class _Stream:
    """A stream whose rows the user's thread makes. `is_new`: it has had none."""

    def __init__(self, client, truncated_rows):
        self._encoder, self._env = wire.RowEncoder(client, newest_frame_only=False), client._env
        self.truncated_rows, self.is_new = truncated_rows, True
        self.steps = queue.SimpleQueue()  # serialized

    def send(self, row):
        if self.is_new:
            self.is_new = False
            self.steps.put(self._encoder.encode_first(row, self._env))
        else:
            self.steps.put(self._encoder.encode(row))
