"""Generated examples are the same in every run, so that main stays green; HYPOTHESIS_PROFILE=wild draws new ones."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("default", derandomize=True, deadline=None)
settings.register_profile("wild", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
