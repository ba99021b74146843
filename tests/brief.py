"""Says in a line for each kind of failure what to look at. `make quick` registers it with --brief, see conftest.py."""

import linecache
import os
import re

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc):
    """Make the ids that functions give short, of characters that -k accepts."""
    for mark in metafunc.definition.iter_markers("parametrize"):
        ids = mark.kwargs.get("ids")
        if callable(ids):
            mark.kwargs["ids"] = lambda value, ids=ids: short(ids(value))


def pytest_configure(config):
    config.option.tbstyle = "no"
    config.option.reportchars = "N"


def pytest_terminal_summary(terminalreporter):
    reports = terminalreporter.stats.get("failed", []) + terminalreporter.stats.get("error", [])
    for line in kinds(reports):
        terminalreporter.write_line(line)


def kinds(reports: list) -> list[str]:
    """Two lines for each place where tests fail: the plainest test's place first, how many tests fail there and why,
    then the command that runs the plainest of them alone."""
    places: dict[tuple, list] = {}
    for report in reports:
        crash = getattr(report.longrepr, "reprcrash", None)
        key = ("", 0) if crash is None else (crash.path, crash.lineno)
        places.setdefault(key, []).append(report)
    lines = []
    for (path, number), failed in sorted(places.items(), key=lambda item: min(map(plainness, item[1]))):
        plainest = min(failed, key=plainness)
        others = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        lines.append(f"{os.path.relpath(path or '.')}:{number}: {reason(plainest, path, number)}{others}")
        lines.append(f'    python -m pytest "{plainest.nodeid}"')
    return lines


def plainness(report) -> tuple[int, str]:
    return len(report.nodeid.partition("[")[2]), report.nodeid


def reason(report, path: str, number: int) -> str:
    """The error in a line, for an assertion without words of its own the line that fails."""
    crash = getattr(report.longrepr, "reprcrash", None)
    message = str(report.longrepr if crash is None else crash.message).strip().partition("\n")[0]
    if re.match(r"(AssertionError: )?assert ", message):
        message = linecache.getline(path, number).strip() or message
    return message[:160]


def short(text: str | None) -> str | None:
    """The words of an id such as {'block': 'parallel', 'window': 3}, as `-k` takes them: block:parallel+window:3."""
    if text is None:
        return None
    text = re.sub(r"[{}()\[\]'\" ]", "", str(text))
    return re.sub(r"[,;]+", "+", text).replace("=", ":").strip("+")
