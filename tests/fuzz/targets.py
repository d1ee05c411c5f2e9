"""All targets, in the order in which they run."""

from tests.fuzz import calls, collectives, files, models, modules, verbs

TARGETS = [*files.TARGETS, *calls.TARGETS]

__all__ = ["TARGETS", "collectives", "models", "modules", "verbs"]  # these fill calls.TARGETS
