# SPDX-License-Identifier: Apache-2.0
"""All targets, in the order in which they run."""

from tools.fuzz import calls, collectives, files, models, modules, runs, verbs

TARGETS = [*files.TARGETS, *runs.TARGETS, *calls.TARGETS]

__all__ = ["TARGETS", "collectives", "models", "modules", "verbs"]  # these fill calls.TARGETS
