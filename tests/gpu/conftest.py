"""Checks that run on the CPU as well keep to one thread, as the tests of the model do."""

from tests.model.conftest import _quiet_and_small  # noqa: F401
