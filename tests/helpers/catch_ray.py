# SPDX-License-Identifier: Apache-2.0
"""polybeast_ray.py with the forks of catch_poly.py and catch_env.py, which learn Catch."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent.parent))

import polybeast_ray

HELPERS = pathlib.Path(__file__).parent
polybeast_ray.LEARNER_SCRIPT = str(HELPERS / "catch_poly.py")
polybeast_ray.ENV_SCRIPT = str(HELPERS / "catch_env.py")

if __name__ == "__main__":
    sys.exit(polybeast_ray.main())
