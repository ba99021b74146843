"""Traces some steps of a training run: call next() before every step, and close() at the end of the run."""

from pathlib import Path

import torch

FIRST = 5  # steps of this process before the first one in the trace, which compile or connect the ranks


class Profile:
    """Writes cfg.profile_steps steps of the first rank to trace.json in out_dir, on a GPU also its memory to
    memory.pickle. A run that ends earlier writes the steps that it has made."""

    def __init__(self, cfg, ranks, say):
        self.folder, self.say, self.cuda = Path(cfg.out_dir), say, ranks.device.type == "cuda"
        self.wanted, self.step, self.profiler = cfg.profile_steps if ranks.first else 0, 0, None

    def next(self):
        if self.wanted and self.step == FIRST:
            if self.cuda:
                torch.cuda.memory._record_memory_history(max_entries=100_000)
            self.profiler = torch.profiler.profile()  # of the CPU and the GPU
            self.profiler.start()
        elif self.step == FIRST + self.wanted:
            self.close()
        self.step += 1

    def close(self):
        if self.profiler is not None:
            if self.cuda:
                torch.cuda.synchronize()
            self.profiler.stop()
            self.profiler.export_chrome_trace(str(self.folder / "trace.json"))
            if self.cuda:
                torch.cuda.memory._dump_snapshot(str(self.folder / "memory.pickle"))
                torch.cuda.memory._record_memory_history(enabled=None)
            self.say(f"trace of {self.step - FIRST} steps in {self.folder}/trace.json, for https://ui.perfetto.dev")
        elif self.wanted:
            self.say(f"profile_steps={self.wanted}: no trace, because the run made at most {FIRST} steps")
        self.profiler, self.wanted = None, 0
