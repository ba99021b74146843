"""Options of pytest, and names of tests. Fixtures stand in tests/fixtures.py."""

from hypothesis import settings

from tests import brief
from tests.brief import pytest_generate_tests  # noqa: F401

# The same examples in every run, so that a failure belongs to the change before it; --hypothesis-profile=random draws
# others.
settings.register_profile("fixed", derandomize=True, deadline=None)  # nothing is timed
settings.register_profile("random", deadline=None)
settings.load_profile("fixed")


def pytest_addoption(parser):
    parser.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="of the tests with the marker gpu")
    parser.addoption("--brief", action="store_true", help="a line for each kind of failure, the plainest test first")


def pytest_configure(config):
    if config.option.brief:
        config.pluginmanager.register(brief)
    # The process that hands out tests to the workers of --numprocesses runs none, and so need not wait for torch.
    if config.getoption("dist", "no") == "no":
        config.pluginmanager.import_plugin("tests.fixtures")


def pytest_make_parametrize_id(val):
    """Bytes are no part of a test's name: gzip's hold the time, and all workers of xdist must know the same names."""
    return "bytes" if isinstance(val, bytes) else None
