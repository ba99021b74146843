"""Compares a GPU with the CPU (attention, blocks, losses, optimizers, training, checkpoints) and measures its speed
(training, decoding, loading, layouts of several GPUs; with --against, also nanoGPT's training). It needs torch and
numpy; two parts also need tensorboard.

    python -m tools.gpu --out=out/gpu.jsonl --against=../nanoGPT    # 8 minutes; again, until no part is left
    python -m tools.gpu --out=out/gpu.jsonl --report=True           # writes docs/gpu.md
    python -m tools.gpu --out=out/gpu.jsonl --part=numbers          # one part, in this process

The parts and their cases are in tools/gpu_cases.py. Each part is a process with a time limit. Whatever ends it or a
call, the next one goes on: with cases that have not begun, then once more with those that have failed, or did not end
(docs/gpu.md). The exit code is 1 if a case has failed.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

import torch

from configurator import parse
from data.errors import command, require, user_errors
from engine.compilation import install, try_compiler, use_private_folder
from engine.device import machine
from engine.parallel.ranks import environment
from tools.child import ROOT, Child, kill_with_parent, stop
from tools.gpu_cases import PARTS, Place

SECONDS = 480  # of a call: a part begins only if its time limit ends before
WORKER = ["-m", "tools.gpu"]
MACHINE = "import sys; from tools.gpu import describe; describe(*sys.argv[1:])"
VERSIONS = {"torch": "torch", "cuda": "CUDA", "cudnn": "cuDNN", "driver": "driver"}  # of a machine
HEADING, EMPTY = "\n## Measured\n", "not measured yet"
MARKS = {  # aimed at with 124 M parameters -> part, figure, least value
    "1.15 times nanoGPT's tokens/s": ("against", "times nanoGPT's speed", 1.15),
    "50 % MFU": ("124M", "MFU", 0.5),
}


@dataclass
class GpuConfig:
    """The flags of tools/gpu.py."""

    # --- gpu
    out: str = "out/gpu.jsonl"  # file of the results, to which each call adds
    device: Literal["cuda", "cpu"] = "cuda"  # cpu rehearses all parts with tiny shapes
    against: str = ""  # nanoGPT's folder, whose train.py is timed too
    compile: bool = True  # False = no run is compiled, for a machine without a C compiler
    report: bool = False  # write the results into docs/gpu.md instead
    part: str = ""  # only this part, in this process

    USED_WHEN: ClassVar[dict] = dict.fromkeys(("against", "compile", "part"), (lambda c: not c.report, "report=False"))

    def __post_init__(self):
        require(self.out.endswith(".jsonl"), f"out={self.out} must be a .jsonl file, such as out/gpu.jsonl")
        require(self.part in ("", *PARTS), f"part={self.part} must be one of: {'; '.join(PARTS)}")
        there = not self.against or (Path(self.against) / "train.py").is_file()
        require(there, f"against={self.against} holds no train.py; give the folder of a checkout")


class Log:
    """The file of results, as far as it is written.

    calls    a line of each call: its machine, device, date and commit
    results  (part, case) -> its last line; without "seconds", the case has begun and not ended. Whatever has ended the
             case, its "figures" are those that it has written since it began
    last     the last line
    """

    def __init__(self, file: str):
        self.file, self.calls, self.results, self.last = Path(file), [], {}, None
        for text in self.file.read_text(errors="replace").splitlines() if self.file.exists() else ():
            with suppress(ValueError, TypeError, LookupError):  # half a line, where a machine has stopped
                self.last = line = json.loads(text)
                if "machine" in line:
                    self.calls.append(line)
                else:
                    key = line["part"], line["case"]
                    figures = self.results[key]["figures"] if "seconds" in line and key in self.results else {}
                    commit = self.calls[-1]["commit"]
                    self.results[key] = line | {"figures": figures | line.get("figures", {}), "commit": commit}

    def add(self, **line):
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with open(self.file, "a") as file:
            file.write("\n" * (file.tell() > 0) + json.dumps(line))

    def cases(self, part: str) -> dict[str, str]:
        """Case -> ok, failed, left (it has begun and not ended) or new."""
        found = {}
        for case in PARTS[part].cases(torch.device(self.calls[-1]["device"])):
            line = self.results.get((part, case), {"new": True})
            found[case] = next((key for key in ("failed", "new") if key in line), "ok" if "seconds" in line else "left")
        return found

    def todo(self, part: str) -> tuple[list[str], bool]:
        """The new cases and False; if there are none, those that have failed, or did not end, and True."""
        cases = self.cases(part)
        new = [case for case, status in cases.items() if status == "new"]
        return new or [case for case, status in cases.items() if status != "ok"], not new

    def summary(self, part: str) -> tuple[str, str, dict]:
        """(status, text, figures) of a part. A number is the largest of all cases; the text has the first failures."""
        cases, figures = self.cases(part), {}
        lines = {case: self.results.get((part, case), {}) for case in cases}
        for key, x in itertools.chain(*(line.get("figures", {}).items() for line in lines.values())):
            if isinstance(x, (int, float)):
                figures[key] = max(figures.get(key, x), x)
        failed = [f"{case}: {line['failed']}" for case, line in lines.items() if "failed" in line]
        left = sum(status in ("left", "new") for status in cases.values())
        texts = [f"{key} {x:,.0f}" if x >= 1000 or x % 1 == 0 else f"{key} {x:.3g}" for key, x in figures.items()]
        more = [f"{left} of {len(cases)} cases left"] * bool(left) + [f"{len(failed)} failed"] * bool(failed)
        text = "; ".join(filter(None, [", ".join(texts), *more, *failed[:3]]))
        return "failed" if failed else "left" if left else "ok", text, figures


def run(cfg: GpuConfig) -> bool:
    """Compute the parts that fit into a call, and print a line for each. Returns whether no case has failed."""
    begin, log = time.monotonic(), Log(cfg.out)
    with Child([sys.executable, "-c", MACHINE, cfg.device, "compile" * cfg.compile], ROOT, 120) as child:
        said, failure = child.lines.read(), child.failure()
    require(not failure, f"torch does not start on the GPU: {failure}; check the output of nvidia-smi")
    facts = json.loads(said)
    here, cause = facts["device"], facts.get("compiler")
    why = f" ({versions(facts)}): {facts.get('warnings') or 'it says no more'}"
    require(here is not None, f"torch finds no GPU{why}; pass --device=cpu for a rehearsal without one")
    remedy = f"{install(torch.device(cfg.device))}, or pass --compile=False"
    require(cause is None, f"compile=True: torch.compile does not work on this GPU: {cause}; {remedy}")
    there = log.calls[-1]["machine"]["device"] if log.calls else here
    require(there == here, f"out={cfg.out} has results of {there}, and here is {here}; give another file")
    git = subprocess.run("git describe --always --dirty", shell=True, cwd=ROOT, capture_output=True, text=True)
    commit, date = git.stdout.strip(), datetime.now(timezone.utc).isoformat(timespec="seconds")
    log.add(machine=facts, device=cfg.device, compile=cfg.compile, date=date, commit=commit)
    print(f"{here}, {versions(facts)}, commit {commit}", flush=True)
    print(f"{'part':<34}{'status':<8}{'seconds':>8}  result", flush=True)
    gpus = facts.get("gpus", 4)
    names = [name for name, part in PARTS.items() if part.gpus <= gpus and (name != "against" or cfg.against)]
    for second, name in itertools.product((False, True), names):
        while True:
            (todo, again), start = Log(cfg.out).todo(name), time.monotonic()
            if not todo or again != second or start - begin + PARTS[name].seconds > SECONDS:
                break
            start_process(cfg, name, todo, gpus)
            status, text, _ = Log(cfg.out).summary(name)
            print(f"{name:<34}{status:<8}{time.monotonic() - start:>8.1f}  {text}", flush=True)
            if again:
                break  # until the next call
    states = Counter(Log(cfg.out).summary(name)[0] for name in names)
    if states["left"]:
        print(f"{states['left']} parts are left for the next call: give the same command again", flush=True)
    return not states["failed"]


def describe(device: str, compiled: str):
    """Print the machine as JSON: with torch's "warnings" about CUDA, and if CUDA's runs are to be compiled and cannot
    be, with the cause of this, "compiler". Called in a process of its own: torch gives its warning once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        facts = machine(torch.device(device))
    facts["warnings"] = "; ".join(" ".join(str(each.message).split()) for each in caught)
    if compiled and device == "cuda" and facts["device"]:
        with suppress(OSError):  # no folder can be made; a part says more
            use_private_folder()
        try:
            try_compiler(torch.device(device))
        except ValueError as error:
            facts["compiler"] = str(error)
    print(json.dumps(facts))


def versions(facts: dict) -> str:
    """The versions of a machine's software, such as "torch 2.13.0, CUDA 13.0"."""
    return ", ".join(f"{name} {facts[key]}" for key, name in VERSIONS.items() if facts.get(key))


def start_process(cfg: GpuConfig, name: str, todo: list[str], gpus: int):
    """Compute cases of a part in a process. What ends it is the failure of the case that had begun, or of all cases if
    none has. A time limit is no failure of a case that came after others, because it had only the rest of the time."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={1 << gpus.bit_length() - 1}"]
    args = [f"--part={name}", f"--out={Path(cfg.out).resolve()}", f"--device={cfg.device}"]
    args += [f"--compile={cfg.compile}", *[f"--against={Path(cfg.against).resolve()}"] * bool(cfg.against)]
    program, before = [*torchrun * (PARTS[name].gpus > 1), *WORKER, *args], Log(cfg.out).last
    with Child([sys.executable, *program], ROOT, PARTS[name].seconds) as child:
        child.lines.read()
        failure = child.failure()
    last = (log := Log(cfg.out)).last
    if last == before:
        for case in todo:
            log.add(part=name, case=case, seconds=0, failed=f"the start: {failure}")
    elif failure and "seconds" not in last and not (child.timed_out and last["case"] != todo[0]):
        log.add(part=name, case=last["case"], seconds=0, failed=failure)


def work(cfg: GpuConfig):
    """Compute the cases of a part that are left, in this process. It ends if no later call of CUDA would work."""
    kill_with_parent()
    log, device, part = Log(cfg.out), torch.device(cfg.device), PARTS[cfg.part]
    require(log.calls, f"out={cfg.out} names no machine yet; leave --part={cfg.part} out")
    if cfg.device == "cpu" or not cfg.compile:  # a rehearsal is not about the compiler, which takes minutes
        torch.compile = partial(torch.compile, backend="eager")
    found = {part: line["figures"] for (part, _), line in log.results.items()}
    add, cases = (log.add if environment().rank == 0 else lambda **_: None), part.cases(device)
    for case in log.todo(cfg.part)[0] if part.gpus == 1 else cases:  # the file changes before other ranks read it
        add(part=cfg.part, case=case)
        note = partial(add, part=cfg.part, case=case)
        place = Place(device, cfg.against, cfg.compile, found, lambda figures, note=note: note(figures=figures))
        start, figures = time.monotonic(), attempt(cases[case], place)
        failed = {"failed": figures.pop("failed")} if "failed" in figures else {}
        add(part=cfg.part, case=case, seconds=round(time.monotonic() - start, 1), figures=figures, **failed)
        if "CUDA error" in failed.get("failed", ""):
            raise SystemExit(1)


def attempt(case: Callable[[Place], dict], place: Place) -> dict:
    try:
        return case(place)
    except Exception as error:  # a kernel may raise anything
        return {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def page(log: Log, text: str) -> str:
    """`text`, that of docs/gpu.md, with the results below its heading; parts that did not run have none."""
    summaries = {name: log.summary(name) for name in {part for part, _ in log.results} & PARTS.keys()}
    lines = ["Nothing was run on a GPU yet."]
    if log.calls:
        commits, call = sorted({line["commit"] for line in log.results.values()}), log.calls[-1]
        here = f"{call['machine']['device']}, {versions(call['machine'])}"
        here += ", nothing compiled" * (not call.get("compile", True))
        lines = [f"{here}, {call['date'][:10]}, commit {', '.join(commits)}."]
    lines += ["", "| aimed at, on an H100 or H200 | reached |", "|---|---|"]
    for title, (name, key, least) in MARKS.items():
        x = summaries[name][2].get(key) if name in summaries else None
        lines.append(f"| {title} | {EMPTY if x is None else f'{key} {x:.3g}: ' + ('yes' if x >= least else 'no')} |")
    lines += ["", "| part | what | result |", "|---|---|---|"]
    for name, part in PARTS.items():
        result = "{}: {}".format(*summaries[name]) if name in summaries else EMPTY
        lines.append(f"| {name} | {part.title} | {' '.join(result.replace('|', '/').split())} |")
    return text.partition(HEADING)[0] + HEADING + "\n" + "\n".join(lines) + "\n"


def main(argv: list[str] | None = None):
    with user_errors():
        cfg = parse(GpuConfig, argv, __doc__)
        if cfg.part:
            return work(cfg)
        if not cfg.report:
            raise SystemExit(not run(cfg))
        log, file = Log(cfg.out), ROOT / "docs" / "gpu.md"
        require(log.calls, f"{cfg.out} has no results of tools.gpu; give another file")
        file.write_text(page(log, file.read_text()))
        print(f"{file} has the figures now")


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # for the parts' processes, as train.py does
    command(main)
