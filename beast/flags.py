# SPDX-License-Identifier: Apache-2.0
"""Flags of every program, and how the command line and a checkpoint are merged into one set."""

import argparse
import datetime
import difflib
import importlib.util
import logging
import os
import re
import shlex
import signal
import sys

import torch

from beast.envs import envpool_envs
from beast.errors import EnvError, FlagError, format_cause
from beast.learners import elastic, torchrun
from beast.learners.compiling import check_compiler
from beast.parser import Parser, absolute_path, folder_name, non_negative, positive
from beast.processes.lifetime import exit_on_signals, exit_with_parent, socket_folder, start_logging
from beast.processes.machine import keep_freed_memory
from beast.processes.watchdog import print_stacks_on_signal
from beast.runs import checkpoint, evaluate
from beast.runs.checkpoint import BEST, NEWEST, run_path
from beast.runs.code_version import compare_code
from beast.servers import credentials

# Flags that a program may do without, and what holds for it then.
LEFT_OUT = {"env_backend": "gym", "precision": "fp32", "write_profiler_trace": False}
LEFT_OUT |= {"greedy": True, "compile": False}


def create_parser(program, description, without=(), env="PongNoFrameskip-v4"):
    """Return a parser with the flags that programs share: run, evaluation, several learners.

    Args:
      program: file name of the program; checkpoints store it.
      without: names of flags, among LEFT_OUT and `elastic`, that it does not have.
      env: default of --env.
    """
    parser = Parser(program, description)

    def add(group, name, *, help, **kwargs):
        if name not in without:
            group.add_argument(f"--{name}", help=help, **kwargs)

    # fmt: off
    run = parser.add_argument_group("run")
    add(run, "mode", default="train", choices=["train", "test", "test_render"],
        help="Train; test: play whole games with a checkpoint; test_render: show them.")
    parser.default_env = env
    add(run, "env", metavar="ID",
        help=f"Environment of Gymnasium, as ID or module:ID. Default: {env}.")
    add(run, "observation_keys", metavar="KEY,...", help="Observe only these parts of a Dict.")
    add(run, "env_backend", default="gym", choices=["gym", "ale_vector", "envpool"],
        help="gym: create_env, one by one; ale_vector: ale-py's AtariVectorEnv, in training; "
        "envpool: EnvPool's ids (docs/environment.md).")
    add(run, "xpid", type=folder_name, metavar="NAME", help="Name of the run, which is resumed if "
        "it has a checkpoint. Default: program, time, a number; with --mode test, the latest run.")
    add(run, "savedir", default="~/logs/torchbeast", metavar="DIR", type=absolute_path,
        help="Folder of all runs.")
    add(run, "seed", type=non_negative(int), help="Seed of environments, initial weights and "
        "action sampling. Default: random (in meta.json).")
    add(run, "checkpoint_interval_s", default=600, type=positive(float),
        help="Seconds between checkpoints.")
    add(run, "wandb", action="store_true",
        help="Log to Weights & Biases, too (pip install wandb).")
    add(run, "disable_checkpoint", action="store_true", help="Save no checkpoints.")
    add(run, "disable_cuda", action="store_true", help="Learn on the CPU.")
    add(run, "precision", choices=["fp32", "bf16"], help="Number format of convolutional and dense "
        "layers. Default: bf16 on devices that are faster in it.")
    add(run, "compile", action="store_true", help="Compile the loss (torch.compile).")
    add(run, "write_profiler_trace", action="store_true",
        help="Write a PyTorch profiler trace of 20 updates into the run's folder.")
    add(run, "stall_timeout_s", default=60, type=positive(float), help="Seconds of silence until a "
        "stack trace is logged; after five times as long a process is replaced.")
    add(run, "end_with_stdin", action="store_true",
        help="Stop, as after SIGTERM, when standard input ends.")
    evaluate.add_flags(parser, without)
    if "elastic" not in without:
        group = parser.add_argument_group("several learners (docs/learners.md)")
        add(group, "elastic", metavar="HOST:PORT", help="Join learners through the torchft "
            "lighthouse at HOST:PORT.")
    # fmt: on
    parser.set_defaults(**{name: LEFT_OUT[name] for name in LEFT_OUT if name in without})
    # What programs find out about the machine that they run on: flags that they fill in, and
    # devices that compute in fp32 though --precision is bf16.
    parser.set_defaults(chosen=[], fp32_devices=[])
    parser.set_defaults(rank=0, num_learners=1)  # of a group of learners; parse_flags sets both
    return parser


def add_server_flags(parser):
    """Add flags for the addresses of environment servers, or for the number to start."""
    # fmt: off
    group = parser.add_argument_group("environment servers")
    group.add_argument("--server_addresses", metavar="LIST", help="Running servers: host:port, "
                       "host:first-last or unix:/path, separated by commas. Default: local ones.")
    group.add_argument("--listen", metavar="HOST:PORT", help="Let environments dial in; "
                       "local servers only with --num_servers.")
    group.add_argument("--max_streams", default=1024, type=positive(int),
                       help="Most streams that dial in.")
    group.add_argument("--insecure", action="store_true", help="Listen without token or TLS.")
    group.add_argument("--num_servers", type=positive(int), help="Server processes to start here. "
                       "Default: by the number of cores; 2 for two cores.")
    group.add_argument("--pipes_basename", metavar="NAME", help="Addresses of servers started "
                       "here: unix:/path (if several, .0, .1, ... added) or first host:port. "
                       "Default: temporary.")
    group.add_argument("--num_actors", type=positive(int), help="Streams to all servers. Default: "
                       "one a server, or two where cores and policy lag allow it.")
    group.add_argument("--envs_per_stream", type=positive(int), help="Environments that a server "
                       "steps as one batch. Default: 8, or fewer for a small --batch_size.")
    # fmt: on
    credentials.add_flags(parser)
    parser.set_defaults(spaces=None)  # of what has dialed in, for a resumed run


def parse_flags(parser, argv=None):
    """Parse the command line; flags not given are taken from the run's checkpoint, if any.

    So `--xpid NAME` alone resumes a run, or tests it, just as it was started. Of several learners
    the first one decides for all. From here on training ends with standard input, if it is to, also
    while PolyBeast waits for servers.

    Raises:
      FlagError: the run, its checkpoint and the flags do not fit together.
    """
    flags = parser.parse_args(argv)
    if sys.platform != "linux":
        raise FlagError(f"this runs on Linux only, not on {sys.platform}")
    if (flags.rank, flags.num_learners) != (0, 1):
        raise FlagError("--rank and --num_learners are set by the program: rename your flag")
    is_elastic = getattr(flags, "elastic", None) is not None
    group = elastic.join_group(flags) if is_elastic else torchrun.join_group(flags)
    savedir = flags.savedir  # other machines may have another one
    flags = group.from_rank_0(lambda: _fill_in(parser, argv, flags))
    flags.savedir = savedir
    flags.rank, flags.num_learners = group.rank, group.size
    if group.by_torchrun:
        torchrun.check_flags(flags)  # after flags of the checkpoint are added
    if is_elastic:
        elastic.check_completed_flags(flags, group)
    script = getattr(sys.modules["__main__"], "__file__", None) or "Python"
    if flags.mode == "train" and flags.eval_interval and argv is not None:
        if os.path.basename(script) != flags.program:
            raise FlagError(
                f"--eval_interval is {flags.eval_interval:,}, at which {script} would start anew: "
                "give main() --eval_interval 0"
            )
    if flags.mode == "train" and flags.end_with_stdin:  # a test looks after this by itself
        exit_with_parent(sys.stdin.fileno(), lambda: os.kill(os.getpid(), signal.SIGTERM))
    return flags


def _fill_in(parser, argv, flags):
    """Return the flags with all defaults filled in; refuse those that contradict each other."""
    if flags.xpid is None:
        now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        name = flags.program.removesuffix(".py")
        name = f"{name}-{now}-{os.urandom(4).hex()}"  # 40 jobs may start in one second
        flags.xpid = name if flags.mode == "train" else "latest"
    elif flags.mode == "train" and not os.path.lexists(run_path(flags)):
        name, names = re.sub(r"\d", "", flags.xpid), _list_runs(flags, NEWEST)
        # Names that differ by more than digits.
        others = [other for other in names if re.sub(r"\d", "", other) != name]
        for similar in difflib.get_close_matches(flags.xpid, others, 1, 0.7):
            logging.warning("--xpid %s is a new run; there is also %s", flags.xpid, similar)
    if flags.xpid == "latest":
        if not run_path(flags).exists():
            raise FlagError(f"there is no {run_path(flags)}: check --savedir, or give an --xpid")
        flags.xpid = run_path(flags).resolve().name
    if flags.best and flags.mode == "train":
        raise FlagError("--best is for --mode test: training resumes the newest checkpoint")
    socket_folder()  # raises if TMPDIR is too long
    saved = checkpoint.load(flags, BEST if flags.best else NEWEST)
    if saved is not None:
        compare_code(run_path(flags))
        flags = _complete(parser, argv, flags, saved)
    elif flags.mode != "train":
        _refuse_missing_run(flags)
    if flags.env is None and not takes_env_of_others(flags):
        flags.env = parser.default_env
    if flags.env is None and flags.mode != "train":
        raise FlagError("the servers of this run sent no environment name: add --env ID")
    if flags.seed is None and flags.mode == "train":
        flags.seed = int.from_bytes(os.urandom(4), "little")
    wants_wandb = flags.mode == "train" and flags.wandb
    if wants_wandb and importlib.util.find_spec("wandb") is None:
        raise FlagError("--wandb needs a package that is not installed: pip install wandb")
    evaluate.check_flags(flags)
    plays = flags.mode != "train" or not takes_env_of_others(flags)
    if plays and flags.env_backend == "envpool":
        envpool_envs.check_installed()
    if flags.mode == "train":
        check_compiler(flags)
    if flags.mode == "train" and not flags.disable_checkpoint:
        checkpoint.to_bytes(vars(flags), "flags")
    return flags


def takes_env_of_others(flags):
    """Return whether environments that run already, or dial in, say what is played."""
    return bool(getattr(flags, "server_addresses", None) or getattr(flags, "listen", None))


def _complete(parser, argv, flags, saved):
    """Return the flags; those that the command line does not give are from a checkpoint."""
    # What was chosen was for a machine that may have been another one.
    with checkpoint.refusing(run_path(flags) / (BEST if flags.best else NEWEST)):
        left = {*checkpoint.NOT_RESUMED, *saved["flags"].get("chosen", [])}
        kept = {k: v for k, v in saved["flags"].items() if k in flags and k not in left}
        parser.check_types(kept)
    # A command line that starts servers leaves those behind that the run had named, and vice versa.
    if getattr(flags, "num_servers", None) or getattr(flags, "pipes_basename", None):
        kept.pop("server_addresses", None)
    if getattr(flags, "server_addresses", None) or kept.get("server_addresses"):
        kept.pop("num_servers", None)
    given, flags = flags, parser.parse_args(argv, argparse.Namespace(**kept))
    flags.xpid = given.xpid
    _refuse_trust(given, flags)
    for name in ("env", "algorithm"):
        old, new = saved["flags"].get(name), getattr(flags, name, None)
        if old not in (None, new):  # None: the servers of that run named no game
            raise FlagError(
                f"--{name} is {new}, but the checkpoint in {run_path(flags)} is of {old}: leave "
                f"--{name} out, or choose another --xpid"
            )
    if flags.mode == "train" and saved["step"] >= flags.total_steps:
        raise FlagError(
            f"{run_path(flags)} has done its {saved['step']:,} steps: raise --total_steps "
            f"({flags.total_steps:,}) to go on, or choose another --xpid"
        )
    return flags


def _list_runs(flags, name):
    """Return the names of runs with a checkpoint of this kind, the newest first."""
    runs = run_path(flags).parent.glob(f"*/{name}")
    runs = sorted(runs, key=lambda path: path.stat().st_mtime, reverse=True)
    return [path.parent.name for path in runs if not path.parent.is_symlink()]


def _refuse_trust(given, flags):
    """Refuse flags of a checkpoint that would run foreign code or send secrets.

    Args:
      given: flags of the command line.
      flags: the same, completed from the checkpoint.
    """
    if given.env != flags.env and ":" in str(flags.env):  # module:ID
        raise FlagError(
            f"the checkpoint in {run_path(flags)} names {flags.env!r}, for which a module would be "
            f"imported: if you trust it, add --env {shlex.quote(flags.env)}"
        )
    addresses = getattr(flags, "server_addresses", None)
    if addresses and given.server_addresses != addresses and given.auth_token_file:
        raise FlagError(
            f"--auth_token_file is given, but the servers that would get it, {addresses!r}, are "
            f"named by the checkpoint in {run_path(flags)} alone: if you trust them, add "
            f"--server_addresses {shlex.quote(addresses)}; if they are gone, --server_addresses ''"
        )


def _refuse_missing_run(flags):
    names = _list_runs(flags, BEST if flags.best else NEWEST)
    hint = "; best.tar needs one finished game" if flags.best else ""
    listed = (
        f"runs with one, the newest first: {', '.join(names[:10])}" if names else "no run has one"
    )
    raise FlagError(f"there is no checkpoint in {run_path(flags)}{hint} ({listed})")


def run_program(main):
    """Run a program's `main` and exit with its status; user errors are printed as one line."""
    start_logging()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else, if ignored, no status of a child is known
    # Only learner threads use more. If this one had started some, too, there would be more of them
    # than cores. Then libgomp's threads sleep between two operations instead of spinning, and an
    # update of small nets takes twice as long.
    torch.set_num_threads(1)
    # Unlike is_available, this does not fix which GPUs there are: a rank of torchrun takes one.
    if "--disable_cuda" in sys.argv or not torch.cuda.device_count():
        keep_freed_memory()
    # Until a run's own handlers are in place: unwind, so that what was started is ended.
    exit_on_signals()
    print_stacks_on_signal()
    try:
        sys.exit(main())
    except (FlagError, EnvError) as error:
        sys.exit(f"{format_cause(error)}{os.path.basename(sys.argv[0])}: {error}")
