# SPDX-License-Identifier: Apache-2.0
"""What a fault campaign found: from the run's logs.csv and the faults, as Markdown."""

import csv
import itertools
import math
import statistics
import time

STANDSTILL = 60  # seconds in which the learner takes a step, whatever happens
BACK_WITHIN = 30  # seconds after the last fault in which the step rate is back,
SHARE = 0.8  # this share of it
UNNOTICED_GROWTH = 8  # MB by which a process may grow while the learner is stopped
MAX_RETURN = 21  # of Pong
TITLES = {
    "kill": "server or actor killed (SIGKILL)",
    "stop": "server or actor stopped, later continued",
    "raise": "environment raises",
    "nan": "environment gives a NaN reward",
    "shape": "environment gives another shape",
    "dtype": "environment gives another dtype",
    "hang": "environment hangs: stops its process",
    "block": "environment hangs: reads a silent pipe",
    "cut": "connection cut (RST)",
    "hole": "packets dropped, both ways",
    "kill main": "servers' main process killed, restarted",
    "end main": "servers ended (SIGTERM), restarted",
    "stop main": "servers' main process stopped, later continued",
    "stop learner": "learner stopped, later continued",
}


class Verdict:
    """Prints tables of a campaign.

    Args:
      campaign: that has ended.

    Attributes: `failures`, texts.
    """

    def __init__(self, campaign):
        self.campaign, self.patience = campaign, campaign.flags.patience
        self.failures = []
        with open(campaign.system.folder / "run" / "logs.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        self.times = [float(row["_time"]) for row in rows]
        self.steps = [int(row["step"]) for row in rows]
        self._judge_standstill()
        if campaign.last is not None:
            self._judge_rate()
        for row in rows:
            for key, value in row.items():
                self._check(not value or math.isfinite(float(value)), f"logs.csv: {key} is {value}")
            mean_return = float(row["mean_episode_return"] or 0)
            self._check(
                abs(mean_return) <= MAX_RETURN, f"logs.csv: mean_episode_return is {mean_return}"
            )
        if campaign.faults:
            self._judge_faults()
        if campaign.growth:
            most = max(campaign.growth)
            print(f"- While the learner was stopped, no process grew by more than {most:.1f} MB")
            self._check(
                most <= UNNOTICED_GROWTH, f"{most:.1f} MB of growth while the learner stopped"
            )
        print()

    def _check(self, holds, text):
        if not holds:
            self.failures.append(text)

    def _judge_standstill(self):
        times, steps = self.times, self.steps
        stops = [f for f in self.campaign.faults if f.kind == "stop learner"]
        longest, since = 0, times[0]
        for i in range(1, len(times)):
            stopped = sum(max(0, min(times[i], f.end) - max(since, f.begin)) for f in stops)
            longest = max(longest, times[i] - since - stopped)
            if steps[i] > steps[i - 1]:
                since = times[i]
        print(f"- Steps: {steps[-1]:,}; longest time without one: {longest:.0f} s")
        self._check(
            longest <= self.patience * STANDSTILL, f"the learner stood still for {longest:.0f} s"
        )

    def _judge_rate(self):
        ticks = list(zip(self.times, self.steps, strict=True))

        def rate(begin, end=math.inf):
            within = [tick for tick in ticks if begin <= tick[0] <= end]
            if len(within) < 2:
                return 0.0
            (first_time, first_step), (last_time, last_step) = within[0], within[-1]
            return (last_step - first_step) / (last_time - first_time)

        quiet, last, settling = self.campaign.quiet, self.campaign.last, self.campaign.settling
        before = rate(*quiet)
        print(f"- Steps/s in {quiet[1] - quiet[0]:.0f} s without faults: {before:,.0f}")
        if not self.campaign.faults:
            return
        enough = SHARE / self.patience * before
        back = math.inf  # seconds after the last fault
        for (since, _), (now, _) in itertools.pairwise(ticks):
            if since >= last and rate(since, now) >= enough:
                back = now - last
                break
        settled = rate(last + settling)
        print(f"- Steps/s during the faults: {rate(quiet[1], last):,.0f}")
        print(
            f"- After the last fault: {enough:,.0f} steps/s within {back:.0f} s; from "
            f"{settling:.0f} s on, {settled:,.0f}"
        )
        soon = self.patience * BACK_WITHIN
        self._check(back <= soon, f"the rate was not back {soon:.0f} s after the last fault")
        self._check(settled >= enough, f"the rate after all faults is {settled:,.0f}")

    def _judge_faults(self):
        campaign = self.campaign
        num_named = sum(fault.named is not None for fault in campaign.faults)
        how = "tc" if campaign.drops_packets else "the proxy"
        print(f"- Faults: {len(campaign.faults)}, {num_named} named in a log; dropped by {how}")
        print(f"- Main processes of servers that ended by themselves: "
              f"{campaign.system.num_own_ends}\n")  # fmt: skip
        columns = ["fault", "number", "named", "over before it could be noticed", "not named"]
        columns += ["s until named, median", "most"]
        print("|", " | ".join(columns), "|\n" + "|---" * len(columns) + "|")
        for kind, title in TITLES.items():
            faults = [fault for fault in campaign.faults if fault.kind == kind]
            missing = [f for f in faults if f.named is None and f.has_to_be_named]
            delays = [f.named - f.begin for f in faults if f.named is not None]
            counts = [len(faults), len(delays), len(faults) - len(delays) - len(missing)]
            cells = [title, *map(str, counts), str(len(missing))]
            cells += [f"{f(delays):.1f}" if delays else "-" for f in (statistics.median, max)]
            if faults:
                print("|", " | ".join(cells), "|")
            for fault in missing:
                at = time.strftime("%X", time.localtime(fault.begin))
                text = f"{kind}, {fault.seconds:.0f} s, at {at}: no {fault.pattern}"
                self._check(False, f"fault {fault.number} is not named: {text}")
