# SPDX-License-Identifier: Apache-2.0
"""Slurm, Kubernetes and Compose are not here: their files start what they should all the same."""

import contextlib
import os
import random
import secrets
import shlex
import signal
import socket
import sys
from pathlib import Path

import pytest
import torch
from counting import free_address
from program import ROOT, Program, last_step, split_words

import polybeast_env
from beast.servers.server_processes import parse_flags

PONG = "PongNoFrameskip-v4"

# What Slurm would do, on this machine.
SLURM = {
    # Runs the command; its options come first. At SIGTERM it kills it.
    "srun": """
        while [ "${1#--}" != "$1" ]; do shift; done
        "$@" & echo $! >"$JOBS/../step"
        trap 'kill -KILL $!' TERM
        wait $!""",
    "sbatch": """
        for word; do case $word in --array=*) array=${word#*=} ;; *) script=$word ;; esac; done
        array=${array:-$(sed -n 's/^#SBATCH .*--array=\\([0-9-]*\\).*/\\1/p' "$script")}
        for task in $(seq "${array%-*}" "${array#*-}"); do
          SLURM_CPUS_PER_TASK=1 bash "$script" &
          echo $! >"$JOBS/$task"
        done""",
    "scancel": """
        if [ "$1" = --signal=TERM ]; then exec kill -TERM $(cat "$JOBS/../step"); fi
        echo "$@" >>"$JOBS/../canceled"
        for job in "$JOBS"/*; do [ ! -e "$job" ] || { kill $(cat "$job"); rm "$job"; }; done""",
    "scontrol": '[ "$1" = show ] && echo 127.0.0.1 || echo "$@" >>"$JOBS/../asked"',
}


def choose_job():
    """Return the number of a job whose ports are free."""
    while True:
        job = random.randrange(1000)
        try:
            for port in (10_000 + job * 20, 10_001 + job * 20):
                with socket.create_server(("127.0.0.1", port)):
                    pass
            return job
        except OSError:
            pass


@pytest.fixture
def slurm(tmp_path):
    """Return a function that starts the script as a job of Slurm, with the learner's flags."""
    job = choose_job()
    (tmp_path / "jobs").mkdir()
    for command, text in SLURM.items():
        (tmp_path / command).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / command).chmod(0o755)
    for path in ("beast", "libtorchbeast", "polybeast.py", "polybeast_env.py", "atari_wrappers.py"):
        (tmp_path / path).symlink_to(ROOT / path)
    environ = {
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "JOBS": str(tmp_path / "jobs"),
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": str(job),
        "SLURM_JOB_NAME": "pong",
        "SLURM_NNODES": "1",
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_JOB_NODELIST": "node[1-1]",
    }

    def start(script, *arguments):
        shell = ("bash", "-c", f'exec bash {script} "$@"')  # whose $0 is Python
        return Program(*arguments, prefix=shell, cwd=tmp_path, **environ)

    start.job = job
    return start


@pytest.mark.whole
def test_slurm_has_environments_come_and_go_and_requeues(slurm, tmp_path):
    name = f"pong-{slurm.job}"
    run, job = tmp_path / "runs" / name, tmp_path / f"slurm-{slurm.job}"
    arguments = "--model shallow --envs_per_stream 2 --batch_size 2 --checkpoint_interval_s 1"
    arguments += " --noop_max 3"
    arguments = (PONG, arguments, "--savedir", tmp_path / "runs")
    with slurm(ROOT / "examples/slurm.sh", *arguments) as script:
        script.wait_until(lambda: last_step(run) > 0 and "| actors 2 |" in script.output)
        words = shlex.split((job / "environments").read_text(), comments=True)
        flags = parse_flags(polybeast_env.parser, words[words.index("polybeast_env.py") + 1 : -2])
        assert flags.noop_max == 3 and flags.env == PONG  # both as the learner has them
        token = job / "token"
        secret = token.read_text()
        assert token.stat().st_mode & 0o777 == 0o600 and len(secret) == 65
        with slurm(tmp_path / "sbatch", "--array=3-3", job / "environments") as more:
            more.end()
            script.wait_until(lambda: "| actors 3 |" in script.output)
        count = script.output.count("| actors 2 |")
        script.wait_until(lambda: script.output.count("| actors 2 |") > count)  # that one left
        (tmp_path / "jobs" / "3").unlink()
        script.process.send_signal(signal.SIGUSR1)  # the time is nearly up
        script.wait_until(lambda: "Caught SIGTERM" in script.output)
        script.process.terminate()  # it is, perhaps before the learners have saved
        script.finish(128 + signal.SIGUSR1)
    step = last_step(run)
    assert torch.load(run / "model.tar")["step"] == step and job.exists()
    assert (tmp_path / "asked").read_text() == f"requeue {slurm.job}\n"

    with slurm(ROOT / "examples/slurm.sh", *arguments) as script:
        script.wait_until(lambda: "Resuming" in script.output and last_step(run) > step)
        # As scancel does, to the script and to its steps.
        os.kill(int((tmp_path / "step").read_text()), signal.SIGTERM)
        script.process.terminate()
        status, output = script.end()
        script.wait_for_members()
    step = last_step(run)
    assert torch.load(run / "model.tar")["step"] == step and not job.exists()
    assert (tmp_path / "asked").read_text() == f"requeue {slurm.job}\n"  # that of before

    with slurm(ROOT / "examples/slurm.sh", *arguments, f"--total_steps {step + 500}") as script:
        script.wait_until(lambda: "Resuming" in script.output)
        assert token.read_text() != secret  # the job was over
        output = script.finish()
        assert "has come" in output, output
    assert last_step(run) >= step + 500 and not job.exists()
    assert (tmp_path / "canceled").read_text() == 6 * f"--name={name}-env\n"


def read_kubernetes():
    """Return the objects of the manifest by kind."""
    yaml = pytest.importorskip("yaml")
    text = (ROOT / "examples" / "kubernetes.yaml").read_text()
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def test_kubernetes_gets_objects_of_its_schema_that_fit():
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    objects = read_kubernetes()
    assert list(objects) == ["Secret", "PersistentVolumeClaim", "Service", "Job", "Deployment"]
    for each in objects.values():
        kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        wrong = {**objects["Job"], "spec": {"backof": 1}}
        kubernetes_validate.validate(wrong, kubernetes_validate.latest_version(), strict=True)
    job, deployment = (objects[kind]["spec"]["template"] for kind in ("Job", "Deployment"))
    assert job["metadata"]["labels"] == objects["Service"]["spec"]["selector"]
    selector = objects["Deployment"]["spec"]["selector"]["matchLabels"]
    assert deployment["metadata"]["labels"] == selector != job["metadata"]["labels"]
    for pod in (job["spec"], deployment["spec"]):
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        (container,) = pod["containers"]
        assert volumes.keys() == {mount["name"] for mount in container["volumeMounts"]}
        secret = volumes["secrets"]["secret"]
        assert secret["secretName"] == objects["Secret"]["metadata"]["name"]
        assert secret["defaultMode"] == 0o400
        claim = volumes.get("logs", {}).get("persistentVolumeClaim")
        if claim:
            assert claim["claimName"] == objects["PersistentVolumeClaim"]["metadata"]["name"]


def test_the_workflow_of_ci_is_yaml():
    yaml = pytest.importorskip("yaml")
    assert yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]


def commands_of_kubernetes():
    objects = read_kubernetes()
    token = objects["Secret"]["stringData"]["token"]
    assert " " in token and f"s/{token}/" in (ROOT / "examples" / "kubernetes.yaml").read_text()
    pods = [objects[kind]["spec"]["template"]["spec"] for kind in ("Job", "Deployment")]
    return [pod["containers"][0]["command"] for pod in pods]


def commands_of_compose():
    yaml = pytest.importorskip("yaml")
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    return [shlex.split(services[name]["command"]) for name in ("learner", "environments")]


@pytest.mark.whole
@pytest.mark.long
@pytest.mark.parametrize("commands", [commands_of_kubernetes, commands_of_compose])
def test_the_commands_of_containers_learn_together(commands, tmp_path):
    address = free_address()
    (tmp_path / "token").write_text(secrets.token_hex())
    (tmp_path / "token").chmod(0o600)
    here = {
        "0.0.0.0:50050": address,
        "torchbeast-learner:50050": address,
        "learner:50050": address,
        "/secrets/token": str(tmp_path / "token"),
        "/logs": str(tmp_path),
    }
    more = {
        "polybeast.py": "--model shallow --batch_size 2 --total_steps 500",
        "polybeast_env.py": "--num_servers 1 --envs_per_stream 2",
    }
    with contextlib.ExitStack() as stack:
        programs = []
        for python, script, *words in commands():
            assert python == "python"
            words = [here.get(word, word) for word in words] + split_words([more[script]])
            programs.append(stack.enter_context(Program(ROOT / script, *words)))
        learner, environments = programs
        status, output = learner.end()
        assert status == 0 and "has come" in output, output
        environments.process.terminate()
        environments.end()
        environments.wait_for_members()
    assert last_step(tmp_path / "latest") >= 500
