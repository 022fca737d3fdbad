"""Every run of the suite draws the same examples, so that a failure is seen again."""

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
