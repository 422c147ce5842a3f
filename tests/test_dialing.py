# SPDX-License-Identifier: Apache-2.0
"""Whole programs: learners that listen, and environments that come and go."""

import os
import signal

import catch_poly  # noqa: F401 - it makes the polybeast of this process play Catch
import pytest
from counting import consecutive_free_addresses, free_address
from launcher import Torchrun, results
from program import HELPERS, Program, column, last_step, load, read_rows, run

import polybeast
import polybeast_env
from beast.errors import EnvError, FlagError

CATCH, CATCH_SERVER = HELPERS / "catch_poly.py", HELPERS / "catch_env.py"
TRAIN = "--batch_size 4 --total_steps 1_000_000_000 --xpid run"


def environments(*addresses, number=1, options="--env Catch"):
    arguments = f"{options} --envs_per_stream 4 --num_servers {number} --learner"
    return Program(CATCH_SERVER, arguments, ",".join(addresses))


def wait_for_streams(program, folder, number):
    """Wait until so many streams play, and the run goes on."""
    step = last_step(folder)
    program.wait_until(
        lambda: (
            last_step(folder) > step + 200
            and float(read_rows(folder)[-1]["connected_actors"]) == number
        )
    )


@pytest.mark.whole
@pytest.mark.timeout(400)
def test_environments_come_and_go_and_a_resumed_run_knows_them(tmp_path):
    address, folder = free_address(), tmp_path / "run"
    arguments = (TRAIN, "--seed 1 --savedir", tmp_path, "--listen", address)
    with Program(CATCH, *arguments) as learner:
        learner.wait_until(lambda: f"environments to dial in at {address}" in learner.output)
        assert not learner.members("spawn_main")  # no servers of its own
        with environments(address, number=2) as first, environments(address) as second:
            wait_for_streams(learner, folder, 3)
            assert "environment process 1 plays for " + address in first.output
            pid = min(first.members("spawn_main"))
            os.kill(pid, signal.SIGKILL)
            learner.wait_until(lambda: "was lost" in learner.output)
            first.wait_until(lambda: "died and is replaced" in first.output)
            wait_for_streams(learner, folder, 3)
            second.process.terminate()
            assert second.end()[0] == 128 + signal.SIGTERM
            wait_for_streams(learner, folder, 2)
            os.killpg(first.pid, signal.SIGKILL)
            learner.wait_until(
                lambda: f"are there: waiting for some at {address}" in learner.output
            )
        with environments(address):
            wait_for_streams(learner, folder, 1)
        learner.process.terminate()  # while nobody is there
        output = learner.finish(128 + signal.SIGTERM)
    assert "Traceback" not in output
    step = load(folder / "model.tar")["step"]
    assert step == last_step(folder) > 0
    assert column(read_rows(folder), "reconnects")[-1] >= 2
    assert "| actors 3 |" in output

    with Program(CATCH, "--xpid run --savedir", tmp_path, "--listen", address) as learner:
        learner.wait_until(lambda: "Resuming" in learner.output)  # though nobody has dialed in
        with environments(address, options="--env Parent") as other:
            status, output = other.end()
        assert status == 1 and "plays Parent, expected Catch" in output
        with environments(address, number=2):
            learner.wait_until(lambda: last_step(folder) > step + 200)
        learner.process.terminate()
        learner.end()


@pytest.mark.whole
@pytest.mark.timeout(400)
def test_the_first_environment_tells_its_spaces_to_all_ranks(tmp_path):
    addresses = consecutive_free_addresses()
    with Torchrun(
        2, "train", tmp_path, "polybeast", TRAIN, "--disable_cuda --savedir", tmp_path,
        "--listen", addresses[0],
    ) as learners:  # fmt: skip
        learners.wait_until(lambda: "to dial in" in learners.output)
        with environments(addresses[1]):  # rank 0 starts as a starved one
            learners.wait_until(lambda: last_step(tmp_path / "run") > 500)
            with environments(*addresses, number=2) as spread:
                for there in addresses:
                    spread.wait_until(lambda there=there: f"plays for {there}" in spread.output)
                step = last_step(tmp_path / "run")
                learners.wait_until(lambda: last_step(tmp_path / "run") > step + 500)
                learners.process.terminate()
                learners.end()
    learners.wait_for_members()
    assert [content["status"] for content in results(tmp_path)] == [0, 0]


@pytest.mark.parametrize(
    ("words", "message"),
    [("--listen 0.0.0.0:5000", "0.0.0.0:5000: other machines may reach it, .*--auth_token_file"),
     ("--listen nowhere", "--listen: the address 'nowhere' should be host:port"),
     ("--listen 127.0.0.1:65536", "'127.0.0.1:65536' should be .* below 65,536"),
     ("--listen a..b:5000 --insecure", "cannot listen at a..b:5000: "),
     ("--listen 127.0.0.1:0 --auth_token_file none", "cannot read --auth_token_file none"),
     ("--listen 127.0.0.1:0 --num_actors 2", "--num_actors 2 are streams to servers"),
     ("--listen 127.0.0.1:0 --max_streams 1e9", "--max_streams 1000000000 may need .* open files"),
     ("--listen 192.0.2.1:5000 --insecure", "cannot listen at 192.0.2.1:5000: ")],
)  # fmt: skip
def test_bad_flags_of_a_learner_are_refused(words, message, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["polybeast.py"])
    with pytest.raises((FlagError, EnvError), match=message):
        polybeast.main([*words.split(), "--env", "Catch", "--savedir", str(tmp_path)])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [("--learner a:1 --server_address b:2", "--learner dials in, --server_address serves"),
     ("--learner nowhere", "--learner has 'nowhere'; give host:port"),
     ("--learner a:0", "--learner has 'a:0'; give host:port"),
     ("--learner a:1 --insecure", "--insecure is for a server")],
)  # fmt: skip
def test_bad_flags_of_environments_are_refused(words, message):
    with pytest.raises(SystemExit, match=f"^polybeast_env.py: {message}"):
        polybeast_env.main(words.split())


@pytest.mark.whole
def test_a_learner_and_environments_with_a_token(tmp_path):
    address, token = free_address(), tmp_path / "token"
    token.write_text("a token that no one knows\n".replace(" ", "-"))
    token.chmod(0o600)
    arguments = ("--total_steps 500 --batch_size 4 --xpid run --savedir", tmp_path / "runs")
    with Program(CATCH, *arguments, "--listen", address, "--auth_token_file", token) as learner:
        learner.wait_until(lambda: "to dial in" in learner.output)
        output = run(CATCH_SERVER, "--env Catch --learner", address, status=1)
        assert f"refused by the learner at {address}: this learner asks for a token" in output
        with environments(address, options=f"--env Catch --auth_token_file {token}"):
            status, output = learner.end()
    assert status == 0 and "without this learner's token" in output
    assert "a-token" not in output
