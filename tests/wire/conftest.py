"""Properties here are about bytes, not about time: no deadline, since a busy machine is not a failure."""

from hypothesis import settings

settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")
