# SPDX-License-Identifier: Apache-2.0
"""Checks that users can run: engines against the oracle, against each other, and over all 2**32 float32 inputs."""

from fmtsim.lab.verify.check_plan import default_tasks, exhaustive_tasks
from fmtsim.lab.verify.outcome import Outcome, Task

__all__ = ["Outcome", "Task", "default_tasks", "exhaustive_tasks"]
