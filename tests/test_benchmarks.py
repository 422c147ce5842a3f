# SPDX-License-Identifier: Apache-2.0
"""Each benchmark still measures: programs change, and what times them must follow."""

import pytest
from program import ROOT, run


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "command",
    [
        "environments.py --repeats 1 --steps 100",
        "gossip.py --repeats 1 --seconds 10",
        "learner_group.py --repeats 1 --updates 3 --nets shallow",
        "memory.py --seconds 5 --sizes 1x2",
        "net.py --nets shallow --batch_sizes 8 --rows 16 --seconds 0.2 --disable_cuda",
        "starvation.py --repeats 1 --seconds 10",
        "straggler.py --repeats 1 --seconds 5",
        "transport.py --repeats 1 --seconds 0.5",
        "whole.py --repeats 1 --seconds 0.5 --whole_seconds 10",
        "whole.py --program polybeast --repeats 1 --seconds 0.5 --whole_seconds 10 --model shallow",
    ],
)
def test_a_benchmark_ends_with_a_table(command):
    name, arguments = command.split(maxsplit=1)
    status, output = run(ROOT / "benchmarks" / name, arguments)
    assert status == 0 and "|---|" in output, output
    assert not any(word in output for word in (" nan ", " inf "))
