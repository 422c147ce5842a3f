# SPDX-License-Identifier: Apache-2.0
"""What the programs call: environments, actors, servers, run folders, logs, evaluation, plots."""
