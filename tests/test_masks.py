# SPDX-License-Identifier: Apache-2.0
"""Forbidden actions are never chosen, and nets learn as if there were none."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from catch import MonoNet
from catch_poly import PolyNet
from program import ROOT, load, run

import gala
import monobeast
import polybeast
import ppo
from beast.nest import map_nest

T, B, A, ALLOWED = 7, 3, 5, 3
BOX = gym.spaces.Box(-1, 1, (4,))
MASKED = gym.spaces.Dict(observation=BOX, action_mask=gym.spaces.MultiBinary(A))
NETS = {"monobeast": MonoNet, "polybeast": PolyNet, "ppo": ppo.Net, "gala": gala.Net}
PROGRAMS = {program.__name__: program for program in (monobeast, polybeast, ppo, gala)}


def make_batch(num_actions):
    """Return a batch for a net with all actions, or with the allowed ones alone."""
    torch.manual_seed(0)
    end = torch.randint(8, (T + 1, B))
    batch = {
        "frame": torch.randn(T + 1, B, 4),
        "reward": torch.randn(T + 1, B),
        "done": end == 0,
        "truncated": end == 1,
        "terminated": end == 2,
        "last_action": torch.randint(ALLOWED, (T + 1, B)),
        "action": torch.randint(ALLOWED, (T + 1, B)),
        "policy_logits": torch.randn(T + 1, B, ALLOWED),
        "baseline": torch.randn(T + 1, B),
    }
    if num_actions == A:
        mask = (torch.arange(A) < ALLOWED).to(torch.int8).expand(T + 1, B, A)
        batch["frame"] = {"observation": batch["frame"], "action_mask": mask}
        forbidden = torch.full((T + 1, B, A - ALLOWED), -1e9)
        batch["policy_logits"] = torch.cat([batch["policy_logits"], forbidden], dim=-1)
    return batch


def compute_loss(program, net, batch):
    flags = program.parser.parse_args(["--disable_cuda"])
    flags.precision = "fp32"
    if program is ppo:
        flags = ppo.resolve(flags, gym.spaces.Discrete(A))
        batch = ppo.compute_targets(flags, net, batch, ())
    return program.compute_loss(flags, net, batch, ())


class Infinite(torch.nn.Module):
    """A net whose logits of forbidden actions are -inf."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def __getattr__(self, name):
        return super().__getattr__(name) if name == "net" else getattr(self.net, name)

    def forward(self, inputs, agent_state):
        outputs, agent_state = self.net(inputs, agent_state)
        logits = outputs["policy_logits"]
        outputs["policy_logits"] = torch.where(logits < -1e8, -torch.inf, logits)
        return outputs, agent_state


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("is_infinite", [False, True], ids=["", "infinite"])
def test_the_loss_is_that_of_a_net_without_the_forbidden_actions(name, is_infinite):
    torch.manual_seed(1)
    net, small = NETS[name](MASKED, A), NETS[name](BOX, ALLOWED)
    torch.nn.init.normal_(net.policy.weight)
    with torch.no_grad():
        for x, y in zip(small.state_dict().values(), net.state_dict().values(), strict=True):
            x.copy_(y[tuple(map(slice, x.shape))])
    batch = make_batch(A)
    if is_infinite:
        batch["policy_logits"] = torch.where(
            batch["policy_logits"] < -1e8, -torch.inf, batch["policy_logits"]
        )
    loss, metrics = compute_loss(PROGRAMS[name], Infinite(net) if is_infinite else net, batch)
    expected, others = compute_loss(PROGRAMS[name], small, make_batch(ALLOWED))
    torch.testing.assert_close((loss, metrics), (expected, others))
    loss.backward()
    expected.backward()
    for x, y in zip(small.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(y.grad[tuple(map(slice, x.shape))], x.grad)
    assert not net.policy.weight.grad[ALLOWED:].any()


@pytest.mark.parametrize("name", NETS)
def test_only_allowed_actions_are_chosen(name):
    torch.manual_seed(0)
    net = NETS[name](MASKED, A)
    mask = torch.rand(50, 40, A) < 0.3
    mask[0] = False  # all are forbidden: then none is
    inputs = map_nest(
        lambda x: x.expand(50, 40, *x.shape), {
            "frame": {"observation": torch.zeros(4)}, "reward": torch.zeros(()),
            "done": torch.zeros((), dtype=torch.bool), "last_action": torch.zeros((), dtype=int),
        },
    )  # fmt: skip
    inputs["frame"]["action_mask"] = mask.to(torch.int8)
    for is_training in (True, False):
        action = net.train(is_training)(inputs, ())[0]["action"]
        allowed = mask.gather(-1, action.unsqueeze(-1)).squeeze(-1) | ~mask.any(-1)
        assert allowed.all()
        assert len(action[0].unique()) > 1 or not is_training


class Picky(gym.Env):
    """Which action is allowed changes with each step; any other one is an error."""

    def __init__(self, in_info=True):
        self.in_info = in_info
        self.action_space = gym.spaces.Discrete(A)
        self.observation_space = gym.spaces.Box(0, 1, (2,), np.float32)
        if not in_info:
            mask = gym.spaces.Box(0, 1, (A,), np.int8)
            parts = {"x": self.observation_space, "action_mask": mask}
            self.observation_space = gym.spaces.Dict(parts)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._observe()

    def step(self, action):
        assert self.mask[action], f"action {action} is forbidden by {self.mask}"
        self.steps += 1
        observation, info = self._observe()
        return observation, 1.0, self.steps == 5, False, info

    def _observe(self):
        self.mask = np.zeros(A, np.int8)
        self.mask[self.np_random.integers(A, size=2)] = 1
        frame = np.zeros(2, np.float32)
        if self.in_info:
            return frame, {"action_mask": self.mask}
        return {"x": frame, "action_mask": self.mask}, {}


gym.register("Picky-v0", Picky)
gym.register("PickyDict-v0", Picky, kwargs={"in_info": False})


@pytest.mark.whole
@pytest.mark.parametrize(
    ("program", "env"),
    [
        ("monobeast", "Picky-v0"),
        ("polybeast", "PickyDict-v0"),
        ("ppo", "Picky-v0"),
        ("dqn", "Picky-v0"),
    ],
)
def test_programs_obey_masks(tmp_path, monkeypatch, program, env):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'tests'}:{ROOT / 'tests/helpers'}")
    arguments = f"--env test_masks:{env} --xpid run --savedir {tmp_path}"
    small = {
        "monobeast": "--num_actors 1 --envs_per_actor 2 --batch_size 2 --total_steps 800",
        "polybeast": "--num_servers 1 --envs_per_stream 2 --batch_size 2 --total_steps 800",
        "ppo": "--num_envs 2 --unroll_length 32 --total_steps 256 --num_env_processes 1",
        "dqn": "--num_actors 1 --envs_per_actor 2 --learning_starts 100 --total_steps 800",
    }[program]
    output = run(ROOT / f"{program}.py", arguments, small)
    assert "is forbidden by" not in output  # an environment that raises is made anew
    assert load(tmp_path / "run" / "model.tar")["step"] > 200
    if program == "monobeast":  # all programs test by the same code
        run(ROOT / "monobeast.py", arguments, "--mode test --num_episodes 5")
