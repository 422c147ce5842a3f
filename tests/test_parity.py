# SPDX-License-Identifier: Apache-2.0
"""MonoBeast and PolyBeast learn the same from the same batch, and say so in the same words."""

import ast

import pytest
import torch
from batches import SPACE, A, make_batch
from catch import MonoNet
from catch_poly import PolyNet
from program import ROOT
from small_run import parse

import monobeast
import polybeast
from beast.actors.weights import LocalWeights
from beast.learners.learner import Learner
from beast.nest import map_nest
from beast.runs import checkpoint
from beast.runs.checkpoint_writer import Writer

# What has the same name in two programs and is not the same; all else of one name is equal.
OWN = {"net_arguments", "resolve", "train"}
LEARNING = OWN | {"compute_loss", "create_optimizer", "learn"}
NET = {"Net.__init__", "Net.forward", "Net.initial_state"}
DIFFERENT = {
    ("gala", "monobeast"): LEARNING | NET | {"main"},
    ("gala", "polybeast"): LEARNING | NET | {"main"},
    ("gala", "ppo"): LEARNING | NET | {"create_env", "main"},
    ("gala", "dqn"): LEARNING | NET | {"main"},
    ("monobeast", "polybeast"): OWN | {"Net.__init__", "batch_and_learn"},
    ("monobeast", "ppo"): LEARNING | NET | {"create_env"},
    ("polybeast", "ppo"): LEARNING | NET,
}


def make_nets(use_lstm):
    """Return MonoBeast's net and PolyBeast's, of the same random weights."""
    mono = MonoNet(SPACE, A, use_lstm)
    poly = PolyNet(SPACE, A, use_lstm, model="shallow")
    for parameter in mono.parameters():  # not the last layer's small weights: a real policy
        torch.nn.init.normal_(parameter, std=0.05)
    poly.load_state_dict(mono.state_dict())
    return mono, poly


@pytest.mark.parametrize(
    ("flags", "use_lstm"),
    [("", False), ("--reward_clipping none --discounting 0.9 --momentum 0.5", True)],
)
def test_learn_gives_equal_loss_gradients_and_weights(flags, use_lstm):
    outcomes = []
    for program, net in zip((monobeast, polybeast), make_nets(use_lstm), strict=True):
        parsed = program.parser.parse_args(flags.split())
        optimizer, decay = program.create_optimizer(parsed, net)
        metrics = []
        for seed in (1, 2):
            batch = make_batch(seed)
            state = net.initial_state(batch["reward"].shape[1])
            state = map_nest(lambda s: torch.full_like(s, 0.1), state)
            metrics.append(program.learn(parsed, net, batch, state, optimizer))
        gradients = {name: p.grad for name, p in net.named_parameters()}
        outcomes.append((metrics, decay(parsed.total_steps / 4), gradients, net.state_dict()))
    torch.testing.assert_close(*outcomes, rtol=0, atol=0)
    assert metrics[0]["total_loss"] != 0 and metrics[0]["grad_norm"] > 0


@pytest.mark.parametrize("number", [0, 1])
def test_a_resumed_learner_goes_on_as_an_uninterrupted_one(number, tmp_path):
    program = (monobeast, polybeast)[number]
    flags = parse(tmp_path, "--xpid run --policy_clipping 0.2", program.parser)

    def create_learner():
        torch.manual_seed(1)  # all start alike
        net = make_nets(use_lstm=False)[number]
        return Learner(net, *program.create_optimizer(flags, net), LocalWeights(net))

    def learn(learner, flags, *seeds):
        metrics = []
        for seed in seeds:
            batch = make_batch(seed, 3, 2)
            metrics.append(program.learn(flags, learner.model, batch, (), learner.optimizer))
            learner.count(metrics[-1]["steps"], [], [])
        return metrics

    learner, resumed, unclipped = create_learner(), create_learner(), create_learner()
    learn(learner, flags, 1, 2)
    checkpoint.run_path(flags).mkdir(parents=True)
    Writer(flags, learner).save(learner)
    assert checkpoint.resume(flags, resumed)
    metrics = learn(learner, flags, 3, 4)
    assert learn(resumed, flags, 3, 4) == metrics
    weights = [one.model.state_dict() for one in (learner, resumed)]
    torch.testing.assert_close(*weights, rtol=0, atol=0)
    # And the policy was clipped in these batches.
    flags.policy_clipping = 1e9
    assert learn(unclipped, flags, 1, 2, 3, 4)[2:] != metrics


def read_functions(path):
    """Return the syntax trees of a file's functions and methods by name."""
    trees = {}
    for node in ast.parse(path.read_text()).body:
        in_class = isinstance(node, ast.ClassDef)
        for part in node.body if in_class else [node]:
            if isinstance(part, ast.FunctionDef):
                trees[f"{node.name}.{part.name}" if in_class else part.name] = ast.dump(part)
    return trees


@pytest.mark.parametrize("programs", DIFFERENT, ids="-".join)
def test_duplicates_in_programs_are_equal(programs):
    one, other = (read_functions(ROOT / f"{program}.py") for program in programs)
    different = {name for name in one.keys() & other.keys() if one[name] != other[name]}
    assert different == DIFFERENT[programs]
    shared = read_functions(ROOT / "beast/learners/nets.py")
    assert "shallow_conv" in shared and "CenteredConv2d.forward" in shared
    assert not (one.keys() | other.keys()) & shared.keys()


def test_flags_of_both_have_the_same_meaning_and_default():
    mono, poly = (
        {action.dest: (action.default, action.help) for action in program.parser._actions}
        for program in (monobeast, polybeast)
    )
    ours = {"num_actors", "num_learner_threads", "program"}  # which mean something else in each
    names = (mono.keys() & poly.keys()) - ours
    assert {name: mono[name] for name in names} == {name: poly[name] for name in names}


def test_the_optimizer_begins_at_one_and_its_rate_falls_to_zero():
    flags = monobeast.parser.parse_args("--learning_rate 0.5 --total_steps 1000".split())
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer, decay = monobeast.create_optimizer(flags, model)
    before = model.weight.item()
    model.weight.grad = torch.full((1, 1), 3.0)
    optimizer.step()
    step = 0.5 * 3 / ((0.99 * 1 + 0.01 * 3**2) ** 0.5 + flags.epsilon)
    assert before - model.weight.item() == pytest.approx(step)
    assert [decay(s) for s in (0, 250, 1000, 1080)] == [1, 0.75, 0, 0]
