# SPDX-License-Identifier: Apache-2.0
"""The environments' side of one stream, whichever side has opened it."""

import time
import traceback

from libtorchbeast import rpcenv_pb2, wire
from libtorchbeast.plain_environments import PlainEnvironments


class Session:
    """Fresh environments for each stream, stepped as one batch.

    Args:
      env_class, make_environments, env: as of Server.
      log: a PeerLog.

    Attributes:
      num_failures: of environments so far.
    """

    def __init__(self, env_class, make_environments, env, log):
        self._is_plain = make_environments is None
        if self._is_plain and not callable(env_class):
            raise ValueError(
                f"env_class should return an environment when called; {env_class} cannot"
            )
        self._make = make_environments or (
            lambda num_envs, seed, _: PlainEnvironments(env_class, num_envs or 1, seed)
        )
        self._env, self._log, self.num_failures = env, log, 0

    def play(self, options, requests, name, busy_since, slot, made=lambda num_envs: None):
        """Yield a serialized Step for the beginning and for each of the serialized Actions.

        Where environments fail, the last Step says so.

        Args:
          options: wire.StreamOptions.
          name: of the stream, for logs.
          busy_since, slot: where time.monotonic() of when environments began to do what they are
            doing goes; 0 while they wait for actions.
          made: called with their number once they are made.

        Raises:
          ValueError: a message is not an Action, or not one for these environments.
          wire.Refusal: the learner does not use these environments.
        """
        environments = None
        try:
            try:
                busy_since[slot] = time.monotonic()
                environments = self._make(options.num_envs, options.seed, name)
                made(environments.num_envs)
                if self._is_plain:
                    environments.truncated_rows = options.truncated_rows
                encoder = wire.RowEncoder(environments, options.newest_frame_only)
                row = environments.initial()
                step = encoder.encode_first(row, self._env)
                likeness = None if self._is_plain else row["last_action"]
                decoder = wire.ActionDecoder(environments.num_envs, likeness)
            except BaseException:  # SystemExit, too, would leave the learner waiting
                busy_since[slot] = 0.0  # the learner may be slow to read
                yield self._failure(name)
                return
            busy_since[slot] = 0.0
            yield step
            for request in requests:
                actions = decoder.decode(request)
                try:
                    busy_since[slot] = time.monotonic()
                    step = encoder.encode(environments.step(actions))
                except BaseException:
                    busy_since[slot] = 0.0
                    yield self._failure(name)
                    return
                busy_since[slot] = 0.0
                yield step
        finally:
            try:
                if environments is not None:
                    busy_since[slot] = time.monotonic()  # closing environments may hang, too
                    environments.close()
            except BaseException:
                self._log.error("cannot close the environments", name, traceback.format_exc())
            busy_since[slot] = 0.0

    def _failure(self, name):
        """Log the exception that is being handled; return a serialized Step that reports it."""
        self.num_failures += 1
        text = traceback.format_exc().encode(errors="replace").decode()
        self._log.error("the environments failed, and the stream ends", name, text)
        return rpcenv_pb2.Step(error=text).SerializeToString()
