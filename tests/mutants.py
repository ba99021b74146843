"""Plant each fault of tests/faults.py in a copy of the project, and see whether the test that it names turns red.

    make mutants                          # all: minutes on 2 cores
    python -m tests.mutants 3 17          # these, counted from 0; what their tests print follows each

The exit code is 1 if more than two survive.
"""

import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from tests.faults import FAULTS

ROOT = Path(__file__).parent.parent
WORKERS = 2


def copy(folder: Path):
    """The files that git tracks or would track."""
    command = "git ls-files -z --cached --others --exclude-standard".split()
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def test(folder: Path, tests: str) -> tuple[bool, str]:
    """Whether the tests, pytest's arguments in one string, are green in the folder; and what they print.

    RuntimeError if pytest cannot run them, subprocess.TimeoutExpired after half an hour: neither tells of a fault.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *tests.split()]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1800)
    if done.returncode not in (0, 1):  # 1: a test failed; others: pytest could not run them
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.returncode == 0, done.stdout


def plant(number: int) -> tuple[bool, str]:
    """Whether this fault survives its tests in a copy of the project, and what they print."""
    fault = FAULTS[number]
    with tempfile.TemporaryDirectory() as folder:
        copy(Path(folder))
        file = Path(folder, fault.file)
        file.write_text(fault.planted(file.read_text()))
        return test(Path(folder), fault.tests)


def main():
    numbers = [int(arg) for arg in sys.argv[1:]] or range(len(FAULTS))
    green, said = test(ROOT, " ".join(sorted({FAULTS[number].tests for number in numbers})))
    if not green:
        sys.exit(f"error: without any fault a test is red already\n{said}")
    survivors = []
    with ThreadPoolExecutor(WORKERS) as threads:
        results = tqdm(threads.map(plant, numbers), total=len(numbers))
        for number, (survives, said) in zip(numbers, results, strict=True):
            fault = FAULTS[number]
            if sys.argv[1:]:
                print(f"--- {number} {fault.file}: {fault.what}\n{said}")
            if survives:
                survivors.append(f"survives: {number} {fault.file}: {fault.what} ({fault.tests})")
    print(*survivors, f"{len(numbers) - len(survivors)} of {len(numbers)} faults are caught", sep="\n")
    sys.exit(len(survivors) > 2)


if __name__ == "__main__":
    main()
