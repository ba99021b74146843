"""Train a model.

    python train.py config/train_shakespeare_char.py --device=cpu --compile=False
    torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py
    torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 train.py config/llama_7b.py
    python train.py --out_dir=out/x --init_from=resume                # goes on as if it had never stopped
    python train.py config/x.py --init_from=nanogpt:ckpt.pt           # starts from nanoGPT's weights

Watch it with tensorboard --logdir=out/x. SIGINT and SIGTERM finish the step (or leave the evaluation), save and exit;
in the first step of a start, which leaves nothing to save, and at the second signal they end the run at once.
"""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C just ends it while there is nothing to save, imports included

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from types import NoneType
from typing import NoReturn

import torch
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

from configurator import Config, command, dump, parse, user_errors
from data.loader import Loader, count_windows, eval_batches
from data.objective import OBJECTIVE, Objective
from data.shards import DataSet, TokenStream, open_data
from engine import checkpoint, interchange, memory, optim, parallel
from engine.folder import FolderLock, check_out_dir, replace_flags
from engine.metrics import Metrics, Silent, evaluation_line, peak_flops, slow_steps
from engine.parallel import Ranks
from engine.sharded_model import ShardedModel
from model import VOCAB_WEIGHTS, Model, ModelConfig, require

DATA = Path(__file__).parent / "data"
FREE_ON_RESUME = {"dropout", "loss_chunk"}  # model flags that may differ from the checkpoint's
STATE = {  # what a resume needs of a checkpoint's state, and its types
    "flags": dict, "samples": int, "skipped": int, "best_val_loss": (float, NoneType), "scaler": dict,
    "tokenizer_hash": (str, NoneType), "ranks": int,
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# What a run starts from


def stored_flags(lock: FolderLock, flags: dict) -> tuple[dict, str]:
    """Flags stored in the checkpoint that init_from names, used as defaults, and the checkpoint's path."""
    kind, _, file = flags["init_from"].partition(":")
    if kind == "resume":
        if not (flags["eval_only"] or flags["plan"]):
            lock.take(flags["out_dir"], make=False)
        path, stored = checkpoint.read(flags["out_dir"], STATE, lambda path, state: (path, state["flags"]))
        return {name: value for name, value in stored.items() if name not in ("out_dir", "init_from")}, str(path)
    if kind == "nanogpt":
        model_args, tensors, _ = interchange.read_nanogpt(file)
        return interchange.from_nanogpt(model_args, tensors)[0], file
    return {}, ""


def restarted(cfg: Config) -> bool:
    """Whether torchrun may start this command again (--max-restarts), and out_dir holds a checkpoint of this very run.

    A run is its flags: a checkpoint with others is an older run's, which this one must not go on with.
    """
    if not parallel.may_restart() or not (Path(cfg.out_dir) / "latest").exists():
        return False
    stored = checkpoint.read(cfg.out_dir, STATE, lambda _, state: state["flags"])
    mine = asdict(cfg).items()
    return all(stored.get(name) == value for name, value in mine if name not in ("init_from", "vocab_size"))


def open_dataset(cfg: Config) -> tuple[DataSet, Objective]:
    """The data set, and what to predict in it; settles cfg.vocab_size. The objective's own ids follow the data's."""
    data = open_data(cfg.dataset, DATA, cfg.vocab_size, cfg.verify_data)
    require(
        data.meta is not None or cfg.objective == "causal",
        f"objective={cfg.objective} adds ids to the data's vocabulary, and dataset={cfg.dataset} has no meta.json with "
        'its size; write {"vocab_size": N} into one beside the shards',
    )
    own = data.meta["vocab_size"] if data.meta else cfg.vocab_size
    objective = OBJECTIVE[cfg.objective](
        own, data.eot, cfg.block_size, cfg.doc_mask, cfg.corrupt_ratio, cfg.span_length
    )
    needed = own + objective.extra_ids
    if cfg.vocab_size == 0:  # matmuls like multiples of 64; a small vocabulary is too small to matter
        unit = 1 if needed <= 1024 else 64
        cfg.vocab_size = -(-needed // unit) * unit
    remedy = f"set it to {needed} or more"
    if cfg.init_from != "scratch":
        remedy = f"init_from={cfg.init_from} settles it, so leave objective, corrupt_ratio and span_length out"
    require(
        cfg.vocab_size >= needed,
        f"vocab_size={cfg.vocab_size} has no room for the data's {own} ids and the {objective.extra_ids} that "
        f"objective={cfg.objective} adds; {remedy}",
    )
    return data, objective


def check_same_model(cfg: Config, flags: dict, path: str | Path):
    """ValueError if the run's model is not the one whose weights are in `path`, which has these flags."""
    for flag in fields(ModelConfig):  # one that is newer than the file had its default
        old, new = flags.get(flag.name, flag.default), getattr(cfg, flag.name)
        remedy = "leave it out, or start from scratch in another --out_dir"
        if flag.name == "vocab_size":
            remedy = "leave it out: the table is padded to what --tp needs by itself"
        same = old == new or flag.name in FREE_ON_RESUME
        require(same, f"{flag.name}={new} differs from {old} in {path}; {remedy}")


def initialize(cfg: Config, sharded: ShardedModel):
    """Give the sharded the weights that a new run starts from: drawn, or those of the file that init_from names."""
    kind, _, file = cfg.init_from.partition(":")
    if kind != "nanogpt":
        return sharded.init_weights(cfg.seed)
    model_args, tensors, _ = interchange.read_nanogpt(file)
    flags, tensors = interchange.from_nanogpt(model_args, tensors)
    check_same_model(cfg, flags, file)
    sharded.fill(tensors | {"head.weight": tensors["wte.weight"]})


def run_tensors(sharded: ShardedModel, optimizer: optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor that a run consists of, by name: to save, or to load into."""
    parameters = dict(sharded.model.named_parameters())
    tensors = {f"model.{name}": sharded.as_global(name, p.detach()) for name, p in parameters.items()}
    for name, t in optimizer.state_tensors(sharded.model).items():
        tensors[f"optim.{name}"] = sharded.as_global(name.rpartition(".")[0], t)
    return tensors


def random_states(ranks: Ranks) -> dict[str, Tensor]:
    states = {f"rng.{ranks.rank}.cpu": torch.get_rng_state()}
    if ranks.device.type == "cuda":
        states[f"rng.{ranks.rank}.cuda"] = torch.cuda.get_rng_state(ranks.device)
    return states


def restore(cfg: Config, ranks: Ranks, sharded: ShardedModel, optimizer: optim.Optimizer) -> dict:
    """Load the latest checkpoint in place; returns its state. ValueError if its model or tokenizer is another one."""

    def load(path: Path, state: dict) -> dict:
        check_same_model(cfg, state["flags"], path)
        random, saved = random_states(ranks), checkpoint.shapes(path)
        random = {name: t for name, t in random.items() if name in saved}
        tensors = run_tensors(sharded, optimizer) | random
        rows = {  # of weights and of their optimizer states
            name: cfg.vocab_size
            for name, t in tensors.items()
            if name.split(".", 1)[1].startswith(VOCAB_WEIGHTS) and t.dim()
        }
        if any(saved[name][0][:1] < (cfg.vocab_rows,) for name in rows.keys() & saved.keys()):
            sharded.init_weights(cfg.seed, VOCAB_WEIGHTS)  # the padding that the saved layout lacks
        checkpoint.load(path, tensors, rows)
        for name, t in random.items():
            torch.set_rng_state(t) if name.endswith("cpu") else torch.cuda.set_rng_state(t, ranks.device)
        if not random:  # this rank was not there
            torch.manual_seed(cfg.seed + 1 + ranks.rank + 1_000_003 * state["step"])
        return state

    return checkpoint.read(cfg.out_dir, STATE, load)


def show_plan(cfg: Config):
    """Print what the run would cost on cfg.world_size GPUs. The vocabulary is the data's, if that is here."""
    from engine import plan

    if cfg.vocab_size == 0:
        try:
            open_dataset(cfg)
        except (ValueError, OSError) as error:
            raise ValueError(f"vocab_size=0 is the data's, but {error}; or plan with --vocab_size=50304") from None
    print(plan.report(plan.estimate(cfg)))


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation


def guarded(batches: Iterator) -> Iterator:
    """The same batches; what is wrong with the data, such as a shard that was changed, ends the run in one line."""
    with user_errors():
        yield from batches


def restore_scaler(scaler: torch.amp.GradScaler, saved: dict, out_dir: str):
    """Load the gradient scaler's state; it begins anew where the checkpoint is from a run in another dtype."""
    if not (scaler.is_enabled() and saved):
        return
    for name, value in scaler.state_dict().items():
        found = saved.get(name)
        good = type(found) is type(value) and math.isfinite(found) and found >= 0
        require(good, f"state.json in {out_dir}: {name} of scaler is {found!r:.60}; bring it back from a copy")
    scaler.load_state_dict(saved)


@torch.no_grad()
def mean_loss(
    cfg: Config,
    ranks: Ranks,
    sharded: ShardedModel,
    objective: Objective,
    lengths: Tensor | None,
    stop: parallel.StopSignal,
    stream: TokenStream,
    n_batches: int,
) -> tuple[float, float | None] | None:
    """(nats per target, bits per byte or None) over a fixed set of windows that does not depend on the ranks.

    None if the ranks have agreed on a stop meanwhile: torchrun gives them 30 s to save.
    """
    # MPS has no float64
    total = torch.zeros(3, dtype=torch.float32 if ranks.device.type == "mps" else torch.float64, device=ranks.device)
    among = ranks.data_rank, ranks.data_size
    batches = eval_batches(stream, objective, cfg.batch_size, n_batches, *among, cfg.seed, ranks.device)
    for batch in map(sharded.batch, guarded(batches)):
        if stop.agreed():
            return None
        targets = batch["targets"]
        counted = (targets >= 0) & sharded.has_loss  # a pipeline's last stage has it
        total[0] += sharded.loss(batch) * counted.sum()
        total[1] += counted.sum()
        if lengths is not None:
            total[2] += (lengths[targets.clamp(min=0)] * counted).sum()
    nats, tokens, n_bytes = ranks.sum(total).tolist()
    return nats / tokens, nats / math.log(2) / n_bytes if n_bytes else None


def byte_lengths(cfg: Config, data: DataSet, ranks: Ranks) -> tuple[Tensor | None, str]:
    """(V,) bytes of text that each token stands for, or None and the reason; the same kind of thing on every rank."""
    lengths, reason = None, "another rank cannot read the tokenizer; set TIKTOKEN_CACHE_DIR to a folder that all share"
    try:
        require(cfg.objective == "causal", f"objective={cfg.objective} restores only a part of the text")
        require(data.tokenizer is not None, f"{data.folder} has no tokenizer in a meta.json")
        lengths = torch.from_numpy(data.tokenizer.byte_lengths).to(ranks.device)
    except ValueError as error:
        reason = error
    if ranks.sum(torch.tensor(float(lengths is None), device=ranks.device)):
        return None, f"no bits per byte: {reason}"
    return lengths, ""


# ---------------------------------------------------------------------------------------------------------------------
# The loop


def compiled_graphs() -> int:
    """Graphs that torch.compile has made so far in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def main(argv: list[str] | None = None):
    with ExitStack() as ends:
        run(argv, ends)


def run(argv: list[str] | None, ends: ExitStack):
    """The command; `ends` takes what is to be closed however it ends."""
    with user_errors():
        lock = ends.enter_context(FolderLock())
        cfg = parse(Config, argv, __doc__, base=partial(stored_flags, lock))
        if cfg.plan:
            return show_plan(cfg)
        parallel.place()  # refused before anything is made
        if not cfg.eval_only and cfg.init_from != "resume":
            lock.take(cfg.out_dir)
        if restarted(cfg):
            cfg.init_from = "resume"
        check_out_dir(cfg)
        data, objective = open_dataset(cfg)
        streams = {split: data.split(split) for split in ("train", "val")}
        val_batches = math.ceil(count_windows(streams["val"], cfg.block_size) / cfg.batch_size)
        ranks = parallel.join(cfg)
        memory.check_training(cfg, ranks, objective.lengths)
        ours = cfg.init_from == "resume" and not cfg.eval_only  # an evaluation may read what another run writes
        start = checkpoint.find(cfg.out_dir).name if ours else cfg.init_from
        require(
            ranks.same(start),
            f"out_dir={cfg.out_dir} does not look the same to all ranks, and to one of them as {start}; wait until its "
            "file system has told all nodes, and start again",
        )
        with torch.device("meta"):
            whole = Model(cfg)  # to count on
        sharded = ShardedModel(cfg, ranks)
        if cfg.init_from != "resume":
            initialize(cfg, sharded)
        torch.manual_seed(cfg.seed + 1 + ranks.rank)  # from here on each rank draws its own
        optimizer = optim.build(sharded.model, cfg, sharded.as_global)
        scaler = torch.amp.GradScaler(ranks.device.type, enabled=ranks.dtype == torch.float16)
        state = {"step": 0, "samples": 0, "skipped": 0, "best_val_loss": None}
        if cfg.init_from == "resume":
            state = restore(cfg, ranks, sharded, optimizer)
            tokenizer_hash = data.tokenizer and data.tokenizer.hash
            require(
                state["tokenizer_hash"] == tokenizer_hash,
                f"dataset={cfg.dataset} has another tokenizer than the checkpoint in {cfg.out_dir}; use the same data",
            )
            restore_scaler(scaler, state["scaler"], cfg.out_dir)
        step, samples, skipped, best = (state[name] for name in ("step", "samples", "skipped", "best_val_loss"))
        micro_steps = cfg.gradient_accumulation_steps // ranks.data_size
        loader = Loader(
            streams["train"], objective, cfg.batch_size, micro_steps, ranks.data_rank, ranks.data_size, cfg.seed,
            ranks.device, start=samples,
        )  # fmt: skip
        ends.callback(loader.close)  # while Python still runs: at its exit there is no thread left to wait for
        batches = guarded(loader)
        peak = math.nan if cfg.eval_only else peak_flops(ranks.device, ranks.dtype) or math.nan
        peak = ranks.sum(torch.tensor(peak)).item()  # of all ranks; nan if it is unknown
        metrics = Silent()
        if ranks.first and not cfg.eval_only:
            metrics = Metrics(
                cfg.out_dir, step, samples * cfg.block_size, cfg.max_iters,
                whole.flops(*objective.lengths) / cfg.block_size, peak if math.isfinite(peak) else None, ranks.device,
            )  # fmt: skip
            ends.callback(metrics.close)
            dump(cfg, Path(cfg.out_dir) / "config.new")
            replace_flags(Path(cfg.out_dir), step)
            if data.tokenizer:
                data.tokenizer.save(cfg.out_dir)  # a bpe's file: sampling needs it when the data is gone

    stop = ends.enter_context(parallel.StopSignal(ranks))
    lengths, why_not = byte_lengths(cfg, data, ranks)
    evaluate = partial(mean_loss, cfg, ranks, sharded, objective, lengths, stop)
    samples_per_step = cfg.batch_size * cfg.gradient_accumulation_steps
    machine = f"{ranks.size} x {ranks.device.type}, {str(ranks.dtype)[6:]}" + ", compiled" * ranks.compile
    metrics.say(
        f"{whole.n_params():,} parameters; {samples_per_step * cfg.block_size:,} tokens per step from "
        f"{streams['train'].name}, {loader.n_windows:,} windows; {machine}"
    )
    moved = optim.rescheduled(step, cfg, state["flags"]) if cfg.init_from == "resume" else ""
    slow = slow_steps(cfg, samples_per_step * whole.flops(*objective.lengths) / peak)
    for note in filter(None, (moved, slow, why_not)):
        metrics.say(note)
    if step >= cfg.max_iters:
        metrics.say(f"{cfg.out_dir} is at step {step} of max_iters={cfg.max_iters}; raise --max_iters to train on")
    saver = checkpoint.Saver(cfg.async_checkpoint)
    saved = saver.saved = step if cfg.init_from == "resume" else None  # steps last handed over, and on the disk
    never = torch.iinfo(torch.int64).max
    graphs_warm, next_best = 0, None  # (step, validation loss) of a best checkpoint that was handed over
    first_bad = torch.full((), never, device=ranks.device)  # first step whose gradient was not finite

    def fail(text: str) -> NoReturn:
        metrics.close()
        with user_errors(code=1):
            raise ValueError(text)

    def check_finite():
        """Ends the run if a gradient was not finite; what it has spoilt is never saved."""
        if first_bad < never:
            with saving_together():
                saver.wait()
            first = samples - (step - int(first_bad)) * samples_per_step  # those of `step` come next
            kept = "nothing is saved yet" if saver.saved is None else f"the checkpoint of step {saver.saved} is good"
            fail(
                f"the loss or its gradient is not finite at step {int(first_bad)} (samples {first} to "
                f"{first + samples_per_step - 1}); {kept}; lower --learning_rate, or leave such steps out with "
                "--skip_nonfinite=True"
            )

    def settle():
        """Wait for the last save. A loss counts as the best one once its checkpoint is on the disk."""
        nonlocal best, next_best
        with saving_together():  # by itself, so that its failure does not keep the next one from being tried
            saver.wait()
        if next_best and saver.saved == next_best[0]:
            best = next_best[1]
        next_best = None

    def save(is_best: bool, last: bool = False):
        nonlocal next_best
        check_finite()
        settle()
        next_best = (step, val_loss) if is_best else None
        now = {
            "samples": samples, "skipped": skipped, "scaler": scaler.state_dict(),
            "best_val_loss": val_loss if is_best else best,
            "flags": asdict(cfg), "ranks": ranks.size, "tokenizer": data.tokenizer and data.tokenizer.spec,
            "tokenizer_hash": data.tokenizer and data.tokenizer.hash,
        }  # fmt: skip
        tensors = run_tensors(sharded, optimizer) | random_states(ranks)
        with saving_together(last):
            saver.save(cfg.out_dir, step, tensors, now, cfg.keep_last, is_best)
            if last:
                saver.wait()

    @contextmanager
    def saving(last: bool = False):
        """What cannot be written ends the run, or, with on_save_error=continue, is said until the `last` try."""
        with user_errors():
            try:
                yield
            except OSError as error:
                if cfg.on_save_error == "stop":
                    raise
                if last:
                    fail(str(error))
                metrics.say(f"warning: {error}; training goes on, as --on_save_error=continue asks")

    @contextmanager
    def saving_together(last: bool = False):
        """`saving` of what all ranks write, and all raise: the first one says it, and none ends before it has."""
        try:
            with saving(last):
                try:
                    yield
                except OSError:
                    if not ranks.first and (cfg.on_save_error == "stop" or last):
                        raise SystemExit(1 if last else 2) from None
                    raise
        except SystemExit:
            if cfg.on_save_error == "stop" or last:
                stop.settle()
                parallel.leave()
            raise

    while True:
        stopping, worth_saving, improved = stop.agreed(), False, False
        if (cfg.eval_only or step % cfg.eval_interval == 0 or step == cfg.max_iters) and not stopping:
            with metrics.paused():
                check_finite()
                sharded.model.eval()
                of_train = evaluate(streams["train"], cfg.eval_iters or val_batches)
                of_val = of_train and evaluate(streams["val"], cfg.eval_iters)
                sharded.model.train()
                sharded.reshard_after_eval()
                stopping = of_val is None
                if not stopping:
                    (train_loss, _), (val_loss, bpb) = of_train, of_val
                    with saving():
                        metrics.evaluation(step, train_loss, val_loss, bpb)
                    if next_best:
                        settle()
                    improved = math.isfinite(val_loss) and (best is None or val_loss < best)
                    worth_saving = step > 0 and (improved or cfg.always_save_checkpoint)
                    if improved and not worth_saving:  # before the first step there is nothing to save
                        best = val_loss
        if cfg.eval_only:
            if ranks.first and not stopping:
                print(evaluation_line(step, train_loss, val_loss, bpb))
            break
        periodic = step > 0 and cfg.save_interval > 0 and step % cfg.save_interval == 0
        if (stopping or worth_saving or periodic) and (step != saved or improved):
            with metrics.paused():
                save(improved)
            saved = step
            stopping = stopping or stop.agreed() or stop.agreed()  # the second call tells of signals during the save
        if stopping or step >= cfg.max_iters:
            settle()
            if saver.saved != saved:
                save(improved, last=True)
        if stopping:
            metrics.say(
                f"stopped by {stop.name or 'a signal to another rank'} with step {saver.saved} saved; go on with "
                f"python train.py --out_dir={cfg.out_dir} --init_from=resume"
            )
        if stopping or step >= cfg.max_iters:
            break

        lr = optim.learning_rate(step, cfg)
        optimizer.set_lr(lr)
        loss = sharded.backward(batches, micro_steps, scaler)
        scaler.unscale_(optimizer)
        norm = sharded.clip(cfg.grad_clip)
        stop.at_risk = True  # all ranks are here, so none has ended itself in its first step
        # With a scaler, an infinite gradient only means that its scale was too large; a loss is not to be infinite.
        finite = torch.isfinite(ranks.sum(loss.clone()) if scaler.is_enabled() else norm)  # the same on every rank
        logging = step % cfg.log_interval == 0
        if not cfg.skip_nonfinite:
            first_bad = torch.where(finite, first_bad, first_bad.clamp(max=step))
            if logging or ranks.device.type == "cpu":  # elsewhere, looking would make the host wait for the device
                check_finite()
        if cfg.skip_nonfinite and not finite:
            skipped += 1
        else:
            scaler.step(optimizer)
        scaler.update()
        sharded.model.zero_grad(set_to_none=True)
        samples += samples_per_step
        if logging:
            mean, epochs = sharded.mean(loss), loader.epochs(samples)
            epoch = epochs if len(epochs) > 1 else samples / loader.n_windows
            with saving():
                metrics.log(step, mean, lr, norm.item(), samples * cfg.block_size, epoch, skipped)
        if ranks.compile and not graphs_warm:
            graphs_warm = compiled_graphs()
        step += 1

    if ranks.compile:
        metrics.say(f"torch.compile: {graphs_warm} graphs, and {compiled_graphs() - graphs_warm} after the first step")
    stop.settle()
    parallel.leave()


if __name__ == "__main__":
    command(record(main))  # torchrun's last words are then of the rank that failed first
