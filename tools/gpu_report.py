"""Runs the parts of `tools.bench --gpu`, each in a process of its own, and keeps their results in a JSON file.

    good = run("cuda", Path("out/gpu.json"), against, measure)     # measure is bench.py's, which times train.py
    print(page(read(Path("out/gpu.json")), Path("docs/gpu.md").read_text()))

The file is written before and after each part, atomically. So whatever ends a call, the next one goes on: with parts
that are missing, then once more with those that have failed, or did not end. A part that has failed twice runs again
only for another commit. tools/gpu_runs.py has the table of the parts.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

import torch

from engine.checkpoint.folder import write_json
from engine.errors import require
from tools.child import Child
from tools.gpu_runs import PARTS, ROOT, flags, write_tokens

SECONDS = 480  # of a call: a part begins only if its time limit ends before
ABOUT = {"status", "text", "seconds", "commit", "tries"}  # keys of a part beside its result
TIMED_LINES = 8  # lines "iter N:", one per 10 steps, after which a run of train.py is ended


def run(device: str, out: Path, against: Path | None, measure: Callable) -> bool:
    """Run the parts that fit into a call, and print a line for each. Returns whether no part of the file has failed."""
    begin = time.monotonic()
    with Child([sys.executable, "-m", "tools.gpu_check", device], ROOT, 60) as child:
        said, failure = child.lines.read(), child.failure()
    require(not failure, f"torch does not start on the GPU: {failure}; check the output of nvidia-smi")
    machine = json.loads(said)
    require(machine["device"] is not None, "torch finds no GPU; pass --device=cpu for a rehearsal without one")
    git = subprocess.run("git describe --always --dirty", shell=True, cwd=ROOT, capture_output=True, text=True)
    date, commit = datetime.now(timezone.utc).isoformat(timespec="seconds"), git.stdout.strip()
    report = load(out, machine) | {"date": date, "machine": machine}
    write_json(out, report)
    print(f"{machine['device']}, torch {machine['torch']}, commit {commit}", flush=True)
    print(f"{'part':<27}{'status':<8}{'seconds':>8}  result", flush=True)
    parts, gpus, left = report["parts"], machine.get("gpus", 4), 0
    tries = {name: part["tries"] for name, part in parts.items() if part["commit"] == commit}
    possible = [name for name, part in PARTS.items() if part.gpus <= gpus and (part.run or against)]
    failed = [name for name in possible if parts.get(name, {}).get("status") == "failed"]
    again = [name for name in failed if tries.get(name, 0) < 2]
    unfinished = [name for name in possible if name not in parts or "left" in parts[name]]
    for name in dict.fromkeys(unfinished + again):
        start = time.monotonic()
        if start - begin + PARTS[name].seconds > SECONDS:
            left += 1
            continue
        before = parts.get(name, {})
        before = before if before.get("commit") == commit and before.get("left") else {}
        about = {"commit": commit, "tries": tries.get(name, 0) + (not before)}
        parts[name] = before | {"status": "failed", "text": "did not end"} | about
        write_json(out, report)
        result = run_part(name, device, gpus, before) if PARTS[name].run else compare(against, device, measure)
        if name.startswith("layout "):
            compare_layout(name, result, parts.get("layout one GPU", {}))
        status, seconds = "failed" if result["failed"] else "ok", round(time.monotonic() - start, 1)
        if "left" in result:
            status, left = "left" if status == "ok" else status, left + 1
        parts[name] = {"status": status, "seconds": seconds, "text": describe(result)} | about | result
        write_json(out, report)
        print(f"{name:<27}{status:<8}{seconds:>8}  {parts[name]['text']}", flush=True)
    print(f"{left} parts are left for the next call: give the same command again\n" * bool(left), end="", flush=True)
    return all(part["status"] != "failed" for part in parts.values())


def run_part(name: str, device: str, gpus: int, before: dict) -> dict:
    """Run a part: its figures, the largest errors of its cases, and {case: cause} of failures. After a crash, a new
    process goes on with the next case. If the time ends before the last case, "left" says so, and a later call goes on
    where `before`, the result so far, ends."""
    part, result = PARTS[name], {"failed": {}} | {key: before[key] for key in before if key not in ABOUT}
    first = done = result.get("cases", 0)
    result.pop("left", None)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={1 << gpus.bit_length() - 1}"]
    program = [sys.executable, *(torchrun if part.gpus > 1 else []), "-m", "tools.gpu_runs", name, device]
    end = time.monotonic() + part.seconds
    while True:
        before, case = done, None
        with Child([*program, str(done)], ROOT, max(1, round(end - time.monotonic()))) as child:
            for found in objects(child.lines):
                case = found.pop("case", None)
                if case is None:
                    result |= found
                elif found:
                    done, result["cases"] = done + 1, done + 1
                    if "failed" in found:
                        result["failed"][case] = found.pop("failed")
                    result |= {key: max(result.get(key, x), x) for key, x in found.items()}
                    case = None
            failure = child.failure()
        late = child.timed_out and done > before  # not the fault of its last case, which had only a part of the time
        if failure and not late and (case or done == before):
            result["failed"][case or "the start"] = failure
            done += bool(case)
            result |= {"cases": done} if case else {}
        if child.timed_out and done > first:
            return result | {"left": "some cases are left for the next call"}
        if not failure or done == before or child.timed_out:
            return result


def objects(lines: Iterable[str]) -> Iterator[dict]:
    """The lines that are JSON objects; libraries may print others."""
    for line in lines:
        with suppress(ValueError):
            yield from [found] if isinstance(found := json.loads(line), dict) else []


def compare(against: Path, device: str, measure: Callable) -> dict:
    """The speed of train.py here and in nanoGPT's folder, with the same flags on random tokens."""
    with tempfile.TemporaryDirectory() as data:
        write_tokens(data, 2**20, 50257, 1024)
        args = flags(f"--dataset={data} --eval_iters=1 --eval_interval=100000 --max_iters=100000", device)
        limits = PARTS["against"].seconds / 2, TIMED_LINES
        try:
            ours, theirs = (measure(checkout, args, *limits)[0] for checkout in (ROOT, against))
        except (ValueError, OSError) as error:
            return {"failed": {"train.py": " ".join(str(error).split())}}
    return {"ms per step": ours, "nanoGPT's ms per step": theirs, "times nanoGPT's speed": theirs / ours, "failed": {}}


def compare_layout(name: str, result: dict, one: dict):
    """Add the differences of losses and gradient norms from those of one GPU, relative to these. The first losses are
    compared more strictly, because every step amplifies rounding."""
    if name == "layout one GPU" or "losses" not in result:
        return
    if len(one.get("losses", [])) != len(result["losses"]):
        result["failed"]["losses"] = "not compared, because the part `layout one GPU` has none"
        return
    limit = 1e-4 if result["dtype"] == "float32" else 1e-2
    for key, n, allowed in (("losses", 3, limit / 10), ("losses", None, limit), ("norms", None, 10 * limit)):
        a, b = (torch.tensor(each[key][:n], dtype=torch.float64) for each in (result, one))
        e = ((a - b).norm() / b.norm()).nan_to_num(1e99).item()
        label = f"the first {key}" if n else key
        result[f"error of {label}"] = e
        if e > allowed:
            result["failed"][label] = f"off by {e:.1e} from one GPU's; {allowed:.0e} is allowed"


def describe(result: dict) -> str:
    """The figures of a part in one line, and its first failures."""
    figures = {key: x for key, x in result.items() if isinstance(x, (int, float))}
    texts = [f"{key} {x:,.0f}" if x >= 1000 or x % 1 == 0 else f"{key} {x:.3g}" for key, x in figures.items()]
    failed = [f"{case}: {cause}" for case, cause in result["failed"].items()]
    failed = [f"{len(failed)} failed"] * bool(failed) + failed[:3]
    return "; ".join([", ".join(texts), *filter(None, [result.get("left")]), *failed])


# ---------------------------------------------------------------------------------------------------------------------
# The file, and docs/gpu.md


def read(file: Path) -> dict:
    """The report in a file. ValueError if it is damaged."""
    try:
        report = json.loads(file.read_text())
        need = [part[key] for part in report["parts"].values() for key in ("status", "text", "commit", "tries")]
        require(None not in [*need, report["date"], report["machine"]["device"]], "a value is missing")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is no report of --gpu ({type(error).__name__}: {error}); give another file") from None
    return report


def load(out: Path, machine: dict) -> dict:
    """The report to go on with. A damaged file is kept under another name; ValueError if it is of another machine."""
    report = {"machine": machine, "parts": {}}
    if out.exists():
        try:
            report = read(out)
        except ValueError as error:
            os.replace(out, out.with_suffix(".damaged"))
            print(f"{error}; it is {out.with_suffix('.damaged')} now, and all parts run again", flush=True)
    there, here = report["machine"]["device"], machine["device"]
    require(there == here, f"--out={out} has results of {there}, and here is {here}; give another file")
    return report


HEADING, EMPTY = "\n## Measured\n", "not measured yet"
MARKS = {  # aimed at with 124 M parameters -> part, figure, least value
    "1.15 times nanoGPT's tokens/s": ("against", "times nanoGPT's speed", 1.15),
    "50 % MFU": ("124M", "MFU", 0.5),
}


def page(report: dict | None, text: str) -> str:
    """`text`, that of docs/gpu.md, with the report's figures below its heading; parts that did not run have none."""
    parts, lines = report["parts"] if report else {}, ["Nothing was run on a GPU yet."]
    if report:
        commits, machine = sorted({part["commit"] for part in parts.values()}), report["machine"]
        lines = [f"{machine['device']}, torch {machine['torch']}, {report['date'][:10]}, commit {', '.join(commits)}."]
    lines += ["", "| aimed at, on an H100 or H200 | reached |", "|---|---|"]
    for title, (name, key, least) in MARKS.items():
        x = parts.get(name, {}).get(key)
        lines.append(f"| {title} | {EMPTY if x is None else f'{key} {x:.3g}: ' + ('yes' if x >= least else 'no')} |")
    lines += ["", "| part | what | result |", "|---|---|---|"]
    for name, part in PARTS.items():
        result = f"{parts[name]['status']}: {parts[name]['text']}" if name in parts else EMPTY
        lines.append(f"| {name} | {part.title} | {' '.join(result.replace('|', '/').split())} |")
    return text.partition(HEADING)[0] + HEADING + "\n" + "\n".join(lines) + "\n"
