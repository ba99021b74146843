"""The flags of a training run: those of the network, of ModelConfig, and these.

cfg = parse(Config)  # configurator.py reads them from config files and the command line
"""

import os
import re
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from flags import documented, refuse
from model import ModelConfig


@dataclass
class Config(ModelConfig):
    """The flags of a training run. ValueError if they do not fit together; it says their values and the remedy."""

    # --- data
    dataset: str = "pycode"  # folder under data/, or a path; or a mixture by weight, as a:0.7,b:0.3
    batch_size: int = 12  # [>0] sequences per micro-batch
    gradient_accumulation_steps: int = 40  # [>0] [<1048576] micro-batches of one step, over all ranks
    pairs: bool | Literal["auto"] = "auto"  # [data] learn the targets of pairs alone; auto = if data have any
    corrupt_ratio: float = 0.15  # [data] [>0] [<1] [objective!=causal] share of the tokens that are to be restored
    span_length: float = 3.0  # [data] [>=1] [objective=seq2seq] mean length of the spans that seq2seq restores
    verify_data: bool = False  # check every shard's SHA-256 before the first step
    # --- run
    out_dir: str = "out"  # folder of checkpoints, metrics and the resolved flags (config.py; earlier: config_STEP.py)
    init_from: str = "scratch"  # scratch, resume (out_dir's latest), checkpoint:RUN, ema:RUN, hf:DIR or nanogpt:FILE
    seed: int = 1337  # [data] for initial weights, the order of the data and dropout
    eval_interval: int = 2000  # steps between evaluations, 0 = only at the end
    eval_iters: int = 200  # batches per evaluation, 0 = the whole validation set (and at most 100 of the training set)
    eval_only: bool = False  # evaluate once and stop
    log_interval: int = 0  # steps between logged steps, 0 = 1 on a CPU, elsewhere 10: logging waits for the device
    always_save_checkpoint: bool = True  # at every evaluation, not only at the end and if val loss improves
    save_interval: int = 0  # also save after this many steps, 0 = only at evaluations
    keep_last: int = 2  # [>0] how many of the newest checkpoints stay, besides the best one
    wandb_log: bool = False  # log to Weights & Biases too, which pip install wandb adds
    wandb_project: str = "superblock"  # project at Weights & Biases
    wandb_run_name: str = ""  # name of the run at Weights & Biases; empty = that of out_dir
    profile_steps: int = 0  # [eval_only=False] trace so many steps of a session, after five, in out_dir/trace.json
    # --- optimizer
    optimizer: Literal["adamw", "muon"] = "adamw"  # adamw for everything; muon for hidden matrices, AdamW for the rest
    weight_decay: float = 0.1  # on matrices only
    beta1: float = 0.9  # [<1] decay of the mean gradient; of Muon's matrices it is muon_momentum
    beta2: float = 0.95  # [<1] decay of the mean squared gradient
    grad_clip: float = 1.0  # largest norm of the gradient, 0 = off
    muon_momentum: float = 0.95  # [<1] [optimizer=muon] Muon's decay of the mean gradient
    ema_decay: float = 0.0  # [<1] keep an average A = d A + (1 - d) W of the weights, later named ema:RUN; 0 = none
    balance_rate: float = 0.001  # step of the biases of experts that are read too rarely or too often
    # [n_expert>0 and router_balance=bias]
    skip_nonfinite: bool = False  # leave out a step whose gradient is not finite, and stop only after 50 in a row
    spike_factor: float = 0.0  # leave out a step whose gradient norm is above so many times the recent median, 0 = off
    # [spike_factor=0 or spike_factor>1]
    # --- schedule
    max_iters: int = 600000  # [>0] optimizer steps
    batch_ramp: str = ""  # micro-batches of the first steps: 8:1000,16:2000 = 8 before step 1000, then 16 before 2000
    learning_rate: float = 6e-4  # highest learning rate; of Muon's matrices it is muon_lr
    muon_lr: float = 0.02  # [optimizer=muon] Muon's highest learning rate
    conv_lr: float = 0.0  # [conv>0] highest learning rate of the taps of convolutions, 0 = learning_rate
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"  # after the warmup; wsd = constant, then linear to min_lr
    warmup_iters: int = 2000  # steps over which the learning rate rises from 0
    lr_decay_iters: int = 0  # [schedule!=constant] step at which the learning rate reaches min_lr, 0 = max_iters
    min_lr: float = 6e-5  # [schedule!=constant] learning rate at the end
    cooldown_iters: int = 0  # [schedule=wsd] steps over which wsd falls to min_lr, 0 = a fifth of lr_decay_iters
    # --- machine
    device: str = "auto"  # [plan=False or device=auto|cuda*] auto, cpu, cuda, cuda:N or mps; a plan is for GPUs
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of matrix products; auto = bfloat16 where fast
    compile: bool | Literal["auto"] = "auto"  # torch.compile each block and the loss; auto = on GPUs
    activation_checkpoint: Literal["none", "selective", "full"] = "none"  # selective: recompute parts, full: all blocks
    deterministic: bool = False  # on GPUs: only deterministic kernels, and no TF32
    # --- ranks, of torchrun
    parallel: Literal["ddp", "fsdp"] = "ddp"  # ddp: data-parallel ranks hold copies, fsdp: shards (FSDP2, ZeRO-3)
    fsdp_reshard: bool = True  # [parallel=fsdp] free a block's weights after its forward; False = ZeRO-2
    dp_replicate: int = 1  # [>0] [parallel=fsdp] HSDP: number of groups of ranks, each with a complete set of shards
    tp: int = 1  # [>0] tensor parallel degree: cuts heads, hidden units and vocabulary; must divide n_kv_head
    cp: int = 1  # [>0] context parallel degree: each rank has two of 2 * cp pieces of every sequence
    ep: int = 1  # [>0] [n_expert>0] expert parallel degree: so many data-parallel ranks divide the experts
    pp: int = 1  # [>0] pipeline parallel degree: number of stages that the blocks are cut into (1F1B schedule)
    backend: Literal["auto", "nccl", "gloo"] = "auto"  # of torch.distributed; auto = nccl on GPUs
    collective_timeout: int = 600  # [>0] seconds after which a rank gives up waiting for another, also for a save
    # --- plan
    plan: bool = False  # print memory, communication and duration of this run for world_size GPUs, and stop
    world_size: int = 1  # [>0] [plan=True] number of ranks in the plan
    gpu: Literal["h100", "h200", "a100", "b200"] = "h100"  # [plan=True] kind of GPU in the plan

    # A flag of nanoGPT and its value -> our flags. nanoGPT's constant rate has no warmup.
    NANOGPT: ClassVar[dict[tuple[str, Any], dict[str, Any]]] = {
        ("decay_lr", True): {},
        ("decay_lr", False): {"schedule": "constant", "warmup_iters": 0},
        ("init_from", "gpt2"): {"init_from": "hf:openai-community/gpt2"},
        ("init_from", "gpt2-medium"): {"init_from": "hf:openai-community/gpt2-medium"},
        ("init_from", "gpt2-large"): {"init_from": "hf:openai-community/gpt2-large"},
        ("init_from", "gpt2-xl"): {"init_from": "hf:openai-community/gpt2-xl"},
    }

    # What most runs set; --help shows these first.
    USUAL: ClassVar[list[str]] = [
        "dataset", "out_dir", "init_from", "n_layer", "n_head", "n_embd", "block_size", "dropout", "pos", "batch_size",
        "gradient_accumulation_steps", "max_iters", "eval_interval", "eval_iters", "optimizer", "learning_rate",
        "min_lr", "warmup_iters", "device", "dtype", "compile",
    ]  # fmt: skip

    # The forms of some flags that are texts. Their comments say them in words.
    FORMS: ClassVar[dict[str, str]] = {
        "dataset": r".*\S.*",
        "out_dir": r"(?!~).*\S.*",
        "init_from": "scratch|resume|(checkpoint|ema|hf|nanogpt):.+",
        "device": r"auto|cpu|cuda(:\d{1,3})?|mps",
        "batch_ramp": r"([1-9]\d{0,5}:[1-9]\d{0,8}(,(?!$)|$))*",
    }

    def __post_init__(self):
        super().__post_init__()
        self.out_dir = os.path.expanduser(self.out_dir)
        for name, form in self.FORMS.items():
            if not re.fullmatch(form, getattr(self, name), re.DOTALL):
                refuse(self, name, f"must be: {documented(type(self))[name].doc}")
        ends = [end for _, end in self.ramp]
        if ends != sorted(set(ends)):
            refuse(self, "batch_ramp", "the steps must ascend, as in 8:1000,16:2000")
        self.check_schedule()

    def check_schedule(self):
        """ValueError unless learning_rate can fall to min_lr within the run."""
        last = "lr_decay_iters" if self.lr_decay_iters else "max_iters"
        end = getattr(self, last)
        cooldown = self.cooldown_iters or end // 5
        if self.schedule == "wsd" and self.warmup_iters + cooldown > end:
            why = f"with a cooldown of {cooldown} steps there are too few; set warmup_iters or cooldown_iters lower"
            refuse(self, f"schedule warmup_iters {last}", why)
        if self.schedule == "cosine" and self.warmup_iters > end and self.max_iters > end:
            refuse(self, f"warmup_iters {last}", "the rate would rise after it has fallen; set warmup_iters lower")
        if self.schedule != "constant" and self.min_lr > self.learning_rate:
            refuse(self, "min_lr learning_rate", "the rate falls to min_lr, so it is the lower one; a tenth is usual")

    @property
    def ramp(self) -> list[tuple[int, int]]:
        """The flag batch_ramp as (micro-batches, the step that has other ones)."""
        return [(int(n), int(end)) for n, end in re.findall(r"(\d+):(\d+)", self.batch_ramp)]

    def micro_batches(self, step: int) -> int:
        """The number of micro-batches of this step, over all ranks."""
        return next((n for n, end in self.ramp if step < end), self.gradient_accumulation_steps)

    def samples(self, step: int) -> int:
        """The number of sequences that all ranks read in this step."""
        return self.batch_size * self.micro_batches(step)

    @property
    def vocab_rows(self) -> int:
        """Rows of the vocabulary's weights, padded so that tp can cut them into equal slices."""
        return -(-self.vocab_size // self.tp) * self.tp
