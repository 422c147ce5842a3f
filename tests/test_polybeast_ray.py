# SPDX-License-Identifier: Apache-2.0
"""PolyBeast on Ray: several raylets on this machine are the nodes of a cluster."""

import os
import platform
import re
import signal
import sys
import uuid

import pytest
from deadline import wait_until
from program import HELPERS, Program, column, last_step, load, marked, read_rows, run

pytest.importorskip("ray", reason="needs requirements-ray.txt")
import ray
from ray.cluster_utils import Cluster

SCRIPT = HELPERS / "catch_ray.py"
CATCH = "--env Catch --disable_cuda --xpid run --batch_size 4 --checkpoint_interval_s 1"


@pytest.fixture
def mark(monkeypatch):
    """NAME=VALUE in the environment of all processes of the test; none is left in the end."""
    value = str(uuid.uuid4())
    monkeypatch.setenv("RAY_TEST", value)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # else Ray writes a token into the home folder
    yield f"RAY_TEST={value}"


@pytest.fixture
def cluster(mark):
    """A head node without cores."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    yield cluster
    cluster.shutdown()


def start(cluster, tmp_path, *arguments):
    where = f"--address {cluster.address}"
    return Program(SCRIPT, where, *arguments, "--", CATCH, "--savedir", tmp_path)


@pytest.mark.whole
@pytest.mark.timeout(600)
def test_nodes_are_lost_and_added(cluster, mark, tmp_path):
    folder, node = tmp_path / "run", {"object_store_memory": 80 << 20}
    learner_nodes = [cluster.add_node(num_cpus=2, **node) for _ in range(2)]
    env_node = cluster.add_node(num_cpus=1, **node)
    wish = "--num_learners 2 --learner_cores 2 --num_env_processes 2"
    with start(cluster, tmp_path, wish) as program:

        def wait_for(text, number=1):
            program.wait_until(lambda: program.output.count(text) >= number)

        def wait_for_steps():
            step = last_step(folder)
            program.wait_until(lambda: last_step(folder) > step + 1000)

        wait_for("plays for")
        wait_for_steps()
        cluster.add_node(num_cpus=1, **node)
        wait_for("plays for", 2)
        cluster.remove_node(env_node, allow_graceful=False)
        wait_for("streams now: 0")
        wait_for_steps()
        cluster.remove_node(learner_nodes.pop(), allow_graceful=False)
        wait_for("All start anew from the checkpoint")
        cluster.add_node(num_cpus=2, **node)
        wait_for("Resuming ")
        wait_for_steps()
        program.wait_until(lambda: column(read_rows(folder), "mean_episode_return")[-1] > 0.9)
        program.process.send_signal(signal.SIGINT)
        status, output = program.end()
        wait_until(lambda: not marked(mark, "catch_"))
    assert status == 128 + signal.SIGINT
    assert "Traceback" not in output
    assert load(folder / "model.tar")["step"] == last_step(folder)


OTHER_RAY = """
import ray
ray.__version__ = "1.2.3"
import catch_ray
catch_ray.polybeast_ray.main()
"""


@pytest.mark.whole
def test_what_cannot_run_is_refused_before_it_starts(cluster, mark, tmp_path):
    cluster.add_node(num_cpus=2, num_gpus=1)
    (tmp_path / "other.py").write_text(OTHER_RAY)
    address = f"--num_env_processes 9 --address {cluster.address}"
    need, room = "each of which needs {'CPU': ", "Ray has 2 CPUs and 1 GPUs"
    for script, arguments, messages in (
        (SCRIPT, "--num_env_processes 1 -- --listen :1", ["--listen is not for this program"]),
        (SCRIPT, "--num_env_processes 9999 --", ["need 10000 cores; Ray has "]),
        (SCRIPT, f"{address} --num_learners 2 --", [f"is 2, {need}1, 'GPU': 1}}", f"1: {room}"]),
        (SCRIPT, f"{address} --learner_cores 3 -- --disable_cuda", [f"{need}3}}", f"0: {room}"]),
        (
            tmp_path / "other.py",
            f"{address} --",
            [f"Ray: {ray.__version__}", "Ray: 1.2.3", f"Python: {platform.python_version()}"],
        ),
    ):
        output = run(script, arguments, "--env Catch", status=1, PYTHONPATH=str(HELPERS))
        *_, line = output.splitlines()
        assert line.startswith("polybeast_ray.py: "), output
        assert all(message in line for message in messages), line
        assert "Traceback" not in output and not marked(mark, "catch_poly")


@pytest.mark.whole
@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a file system")
def test_a_folder_that_learners_do_not_share_is_refused(cluster, mark, tmp_path):
    cluster.add_node(num_cpus=1)
    start_node = f"{sys.executable} -m ray.scripts.scripts start --address {cluster.address}"
    start_node += " --num-cpus 1 --object-store-memory 80000000 --block"
    mount = f"mount -t tmpfs none {tmp_path} && exec {start_node}"
    with Program("-c", prefix=["unshare", "--mount", "sh", "-c", mount]) as node:
        node.wait_until(lambda: "Ray runtime started" in node.output)
        with start(cluster, tmp_path, "--num_env_processes 1 --num_learners 2") as program:
            status, output = program.end()
    *_, line = output.splitlines()
    assert status == 1 and f"--savedir {tmp_path} is not on a file system that learners" in line


@pytest.mark.whole
def test_what_cannot_run_ends_it_with_the_reason(cluster, mark, tmp_path):
    cluster.add_node(num_cpus=3)
    start_it = f"--address {cluster.address} --num_env_processes 1"
    for words, reason, line in (
        ("-- --env NoGame --savedir", "KeyError: 'NoGame'", "all environments have ended by"),
        (
            "--num_learners 2 -- --savedir /proc/none --env",
            "",
            "a learner cannot run: .*/proc/none",
        ),
    ):
        output = run(SCRIPT, start_it, words, tmp_path, "--disable_cuda --xpid run", status=1)
        assert reason in output, output
        assert re.match(f"polybeast_ray.py: {line}", output.splitlines()[-1]), output
        wait_until(lambda: not marked(mark, "catch_"))
