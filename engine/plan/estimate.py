"""Estimates what one rank of a run keeps and sends, for --plan and for the refusal of a run that cannot fit.

What blocks take and send is measured on fake tensors. The rest are formulas, which round up: FSDP is taken to gather
what is in no block in float32, and a rank of a pipeline to have both ends of the model, the layers of the stage with
most parameters, and the activations of the stage that keeps most. What ranks exchange in the loss is not counted.
"""

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.distributed_c10d import _resolve_process_group as resolve_group
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ops
from data.objective import objective_of
from engine.config import Config
from engine.optim import OPTIMIZER, Balance, Muon, hidden_matrices, state_bytes
from engine.parallel import context, expert, ranks, tensor
from engine.parallel.fsdp import kept_whole
from engine.parallel.recomputation import recompute
from engine.parallel.sharded import load_biases
from engine.plan.accounting import skeleton
from engine.settle import by_device
from model import MLP, Block, ExpertLinear, Inputs, MultiHeadAttention

GPU = torch.device("cuda")
CUTS = {"tp": tensor.apply_tensor_parallel, "cp": context.apply_context_parallel, "ep": expert.apply_expert_parallel}


class Trace(TorchDispatchMode):
    """Counts bytes of a block's new tensors: live, their peak, kept after the forward, and sent by group of ranks. A
    tensor is new if no argument of the operation that returns it has its storage. Casts of weights, which autocast
    makes once per forward, do not count."""

    def __init__(self, block: Block):
        super().__init__()
        self.live = self.peak = self.kept = 0
        self.sent = Counter()
        self.weights = storages([*block.parameters()])

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, _, name = func._schema.name.partition("::")
        if name == "wait_tensor":  # a fake one would be another tensor
            return args[0]
        out = func(*args, **(kwargs or {}))
        if "c10d" in namespace:
            n = max(t.nbytes for t in tree_leaves((args, out)) if isinstance(t, Tensor))
            if name == "allreduce_":
                n *= 2
            boxed = [a for a in args if isinstance(a, torch.ScriptObject)]
            group = dist.ProcessGroup.unbox(boxed[0]) if boxed else resolve_group(args[-1])
            self.sent[group.group_desc] += n
        given = storages((args, kwargs))
        if not (func is torch.ops.aten._to_copy.default and given <= self.weights):
            for storage in storages(out) - given:
                self.allocate(storage.nbytes())
                weakref.finalize(storage, self.allocate, -storage.nbytes())
        return out

    def allocate(self, n: int):
        self.live += n
        self.peak = max(self.peak, self.live)


def storages(tree) -> set[torch.UntypedStorage]:
    """Those of all tensors in nested lists, tuples and dictionaries."""
    return {t.untyped_storage() for t in tree_leaves(tree) if isinstance(t, Tensor)}


class Rank:
    """The rank that has most to do in a run on `size` devices of this kind. It needs no other rank. measure() completes
    its traffic and memory, in bytes by kind, and makes torch import sympy and dynamo, which takes two seconds."""

    def __init__(self, cfg: Config, size: int, device: torch.device = GPU):
        self.cfg = cfg = copy.copy(cfg)
        self.device = device
        self.dtype = torch.bfloat16 if cfg.dtype == "auto" else getattr(torch, cfg.dtype)
        self.width = self.dtype.itemsize  # bytes of a number in matrix products
        self.cast = self.width if self.width < 4 else 0  # bytes that autocast keeps of a number, cast to 16 bits
        by_device(cfg, device, self.dtype)
        self.fsdp = cfg.parallel == "fsdp" and size > 1
        data = ranks.data_ranks(cfg, size)
        shards = data * cfg.cp // cfg.dp_replicate
        self.groups = {  # kind -> (number of ranks, distance between consecutive ranks)
            "tp": (cfg.tp, 1),
            "cp": (cfg.cp, cfg.tp),
            "ep": (cfg.ep, cfg.tp),
            "experts": (shards // cfg.ep, cfg.ep * cfg.tp),
            cfg.parallel: (shards, cfg.tp),
            "hsdp": (cfg.dp_replicate, shards * cfg.tp),
            "muon": (size // cfg.pp, 1),
            "pp": (cfg.pp, size // cfg.pp),
        }
        self.micro_steps = cfg.gradient_accumulation_steps // data
        self.lengths = objective_of(cfg, cfg.vocab_size, eot=0).lengths
        width = 4 if cfg.fp32_residual else self.width
        self.streams = [width * cfg.batch_size * n * cfg.n_embd // cfg.cp // cfg.tp for n in self.lengths]
        self.stages = [ranks.layers_of_stage(cfg.n_layer, stage, cfg.pp) for stage in range(cfg.pp)]
        self.n_layer = len(self.stages[0])  # no stage has more
        self.model = skeleton(cfg)
        if cfg.pp > 1:
            from engine.parallel.pipeline import check_model

            check_model(self.model, cfg.pp)
        self.count_weights()

    def count_weights(self):
        self.traffic = Counter()  # kind of group -> bytes that the rank sends in a step to ranks of this group
        self.held = Counter()  # numbers in this rank's shard, by optimizer
        self.gathered = Counter()  # numbers in all shards, by block; "" has what is in none
        self.owned = self.muon_flops = 0.0  # numbers that Muon orthogonalises here, and the FLOPs for it
        optimizer = OPTIMIZER[self.cfg.optimizer]
        trained_by = dict.fromkeys(load_biases(self.model), Balance)
        if optimizer.muon:
            trained_by |= dict.fromkeys(hidden_matrices(self.model), Muon)
        sizes = [sum(p.numel() for p in block.parameters()) for block in self.model.blocks]
        largest = max(self.stages, key=lambda layers: sum(sizes[layer] for layer in layers))
        here = tuple(f"blocks.{layer}." for layer in largest)
        for name, p in self.model.named_parameters():
            if name.startswith(here) or not name.startswith("blocks."):
                self.count_weight(name, p, trained_by.get(p, optimizer.rest))
        self.parameters = 4 * self.held.total()
        state = sum(state_bytes(kind, held) for kind, held in self.held.items())
        if self.cfg.ema_decay:
            state += self.parameters
        self.memory = {"parameters": self.parameters, "gradients": self.parameters, "optimizer state": state}
        self.states = sum(self.memory.values())

    def count_weight(self, name: str, p: Tensor, optimizer: type):
        """Count a weight, and what ranks send of it and of its gradient."""
        if optimizer is Muon:
            owned = p.numel() / self.groups["muon"][0]
            self.owned += owned
            self.muon_flops += 30 * min(p.shape[-2:]) * owned
        group = self.cfg.parallel
        shards = 1
        rows = len(p)
        if self.cfg.ep > 1 and isinstance(self.model.get_submodule(name.rpartition(".")[0]), ExpertLinear):
            group = "experts"
            rows //= self.cfg.ep
        n = rows * (p.numel() // len(p))
        cut = tensor.sharded_dim(self.model, name) if self.cfg.tp > 1 else None
        if cut is None:
            self.send("tp", 8 * n)
        else:
            n //= self.cfg.tp
        if cut == 0:
            rows //= self.cfg.tp
        if self.fsdp:  # which cuts between rows
            shards, _ = self.groups[group]
        held = -(-rows // shards) * n // rows
        block = name.rpartition(".sums.")[0]
        self.gathered[block] += n
        self.held[optimizer] += held
        self.send(group, shards * held * self.exchanged(block))
        self.send("hsdp", 8 * held)

    def exchanged(self, block: str) -> int:
        """Bytes that data-parallel ranks exchange in a step for a number of a weight, and of its gradient, in float32.
        FSDP gathers blocks for the backward too; in a pipeline, this serves the next forward."""
        width = 4
        gathers = reductions = 1
        if self.fsdp and self.cfg.pp == 1:
            gathers = self.micro_steps
            if self.cfg.fsdp_reshard:
                reductions = gathers
        if self.fsdp and block:
            width = self.width
            if self.cfg.fsdp_reshard:
                gathers = self.micro_steps + max(reductions, self.cfg.pp - 1)
        return width * gathers + 4 * reductions

    def send(self, group: str, nbytes: float):
        """Count what a rank sends when its group gathers or reduces so many bytes in a ring."""
        n, _ = self.groups[group]
        self.traffic[group] += nbytes * (n - 1) / n

    def measure(self):
        """Measure the blocks, with which the model is of no more use, and set the memory."""
        cfg = self.cfg
        with self.as_in_training(), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            self.run_blocks()
        encoder, decoder = self.traces[: -cfg.n_layer], self.traces[-cfg.n_layer :]
        of_stages = [[decoder[layer] for layer in layers] for layers in self.stages]
        traces = encoder + max(of_stages, key=lambda traces: sum(trace.kept for trace in traces))
        for trace in traces:
            for kind, n in trace.sent.items():
                self.send(kind, n * self.micro_steps)
        # there and back: the embeddings, what the decoder reads of the encoder, and the loss
        self.send("tp", 4 * self.micro_steps * cfg.tp * sum(self.streams))
        self.send("muon", self.width * (self.held[Muon] + self.owned))
        if cfg.pp > 1:  # as a rank in the middle
            self.traffic["pp"] = 2 * self.micro_steps * self.streams[0]
        kept = 2 * self.streams[0] + (2 + cfg.tp) * self.streams[1]  # embeddings with dropout, and the memory
        kept += sum(trace.kept for trace in traces)
        in_flight = min(cfg.pp, self.micro_steps)  # of the first rank
        self.take_memory(kept * in_flight, max(trace.peak - trace.kept for trace in traces))

    @contextmanager
    def as_in_training(self) -> Iterator[None]:
        """The model cut and changed in place as in training, among ranks that do not exist, and its blocks traced."""
        cfg = self.cfg
        device_of_kernels = ops.device_of_kernels
        ops.device_of_kernels = lambda _: self.device.type  # fake tensors are on the CPU
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=max(cfg.tp, cfg.cp, cfg.ep))
        try:
            for name, cut in CUTS.items():
                n = getattr(cfg, name)
                if n > 1:
                    cut(self.model, dist.new_group([*range(n)], group_desc=name))
            for m in self.model.modules():
                if isinstance(m, MultiHeadAttention):
                    m.dropout = 0.0  # of which a GPU's kernels keep no mask
                if isinstance(m, Block):
                    if cfg.activation_checkpoint != "none":
                        recompute(m, cfg.activation_checkpoint)
                    m.forward = partial(self.trace, m, m.forward)
            yield
        finally:
            ops.device_of_kernels = device_of_kernels
            dist.destroy_process_group()

    def run_blocks(self):
        """Set the traces of the blocks of the encoder, if there is one, then of the model. Documents are left out, as
        attention to them takes as much."""
        cfg, model = self.cfg, self.model
        self.traces = []
        self.known = {}
        T, S = self.lengths
        model.to_empty(device="cpu")
        model.tie()
        model.loss = lambda x, targets: x
        ids = torch.zeros(cfg.batch_size, max(T, S), dtype=torch.int64)
        with torch.autocast("cpu", self.dtype, enabled=self.cast > 0):
            model(ids[:, : T // cfg.cp], ids, source=ids[:, :S] if S else None)

    def trace(self, block: Block, forward: Callable, x: Tensor, inputs: Inputs) -> Tensor:
        """Add the trace of a block, in place of its forward. The first of each kind is run."""
        modules = [m for m in block.modules() if isinstance(m, MultiHeadAttention | MLP)]
        readers = tuple((m.reader, getattr(m, "window", 0)) for m in modules)
        kind = x.shape, readers, *(p.shape for p in block.parameters())
        if kind not in self.known:
            wide = {*kept_whole(block)}
            for p in block.parameters():
                if self.fsdp and p not in wide:  # which FSDP gathers in the dtype
                    p.data = p.to(self.dtype)
                p.grad = torch.empty_like(p)
            with torch.enable_grad(), Trace(block) as trace:
                y = forward(x.detach().requires_grad_(), inputs)
                trace.kept = trace.live
                y.backward(torch.ones_like(y))
            self.known[kind] = trace
            for name, handed in inputs.shared.items():  # without the graph, which the backward has freed
                inputs.shared[name] = handed.detach().requires_grad_(handed.requires_grad)
        self.traces.append(self.known[kind])
        return x

    def take_memory(self, activations: float, backward: float):
        """Set the memory of a rank whose blocks keep these activations, and take so much more in a backward. The loss
        takes the last norm's result, gathered with its gradient, the head's gradient, and a chunk's logits with their
        gradient. Uncompiled, it keeps logits and logarithms in float32 too."""
        cfg = self.cfg
        vocab = cfg.vocab_rows // cfg.tp
        tokens = cfg.batch_size * self.lengths[0] // cfg.cp
        logits = vocab * ops.rows_at_once(tokens, cfg.loss_chunk, vocab, self.device)  # of a chunk
        of_logit = 2 * self.width
        if not cfg.compile:
            of_logit += 8 * ((self.cast > 0) + (cfg.logit_softcap > 0))
        loss = 3 * cfg.tp * self.streams[0] + vocab * cfg.n_embd * (4 + self.cast) + logits * of_logit
        update = (4 + 2 * self.width) * self.held[Muon] + self.width * self.owned + 16 * min(self.owned, Muon.LARGEST)
        self.memory |= self.copies()
        self.memory["activations"] = activations
        self.memory["streams received"] = self.traffic["pp"]  # for each of which PyTorch allocates a buffer
        self.total = max(sum(self.memory.values()) + max(loss, backward), self.states + update)
        self.memory |= {"logits and loss": loss, "backward of a block": backward, "update by Muon": update}

    def copies(self) -> dict[str, int]:
        """Copies of weights and gradients. FSDP gathers a block while another computes, and reduces in float32. What is
        in no block stays gathered, in a pipeline all weights; then only the last micro-step reduces gradients."""
        blocks = [n for block, n in self.gathered.items() if block]
        if not self.fsdp:
            return {"weights cast by autocast": self.cast * sum(blocks)}
        gathered = 2 * self.width * max(blocks)
        gradients = (self.width + 4) * max(blocks)
        if self.cfg.pp > 1 or not self.cfg.fsdp_reshard:
            gathered = self.width * sum(blocks)
            if self.micro_steps > 1:
                gradients = 4 * sum(blocks)
        rest = 4 * self.gathered[""]
        return {"gathered weights": rest + gathered, "unsharded gradients": rest + gradients}
