# SPDX-License-Identifier: Apache-2.0
"""What a job tells of its progress."""

from fmtsim.support.progress import Progress


class Steps(Progress):
    """Keep the steps that were told, of each stage by its label and number of steps."""

    def __init__(self):
        self.told = {}

    def stage(self, label, total):
        self._counts = self.told.setdefault((label, total), [])

    def step(self, done, note=""):
        self._counts.append(done)
