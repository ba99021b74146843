import pytest

from data import corpus


@pytest.fixture
def small(monkeypatch):
    """Makes jobs so small that a few documents need many of them."""
    monkeypatch.setattr(corpus, "JOB_CHARACTERS", 60)
    monkeypatch.setattr(corpus, "JOB_DOCUMENTS", 3)
