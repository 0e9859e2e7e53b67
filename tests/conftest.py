"""Settings all tests share: the CPU, and hypothesis without deadlines."""

import os

# Before anything imports jax. Tests that need several devices start their own process.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import hypothesis  # noqa: E402

hypothesis.settings.register_profile(
    "tests", deadline=None, max_examples=25, derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("tests")
