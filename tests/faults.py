"""Faults to plant, one at a time: each changes what the program computes and none stops it, so only a test can tell.

FAULTS holds tuples (file, old, new, what): `old` stands exactly once in `file`, a path from the root, `new` takes its
place, and `what` says which behaviour is wrong then. They were drafted from the code alone.
"""

FAULTS = [
    # ---- model.py
    (
        "model.py",
        "lo, hi = (i - self.window + 1).clamp(min=0), hi.minimum(i + self.window)",
        "lo, hi = (i - self.window + 1).clamp(min=0), hi.minimum(i + self.window + 1)",
        "Sliding windows that look both ways (masked models, encoders) see one key too many behind the query.",
    ),
    (
        "model.py",
        "band = (j > i) & (j <= i + W)",
        "band = (j >= i) & (j <= i + W)",
        "Sliding windows on the fused causal path hold W + 1 keys from the second block of queries on.",
    ),
    (
        "model.py",
        "return v[:, :, -mask.window :].mean(dim=2, keepdim=True)",
        "return v.mean(dim=2, keepdim=True)",
        "Simplified blocks' content-free attention ignores the window in cached decoding, and there only.",
    ),
    (
        "model.py",
        "dq, dk, dv = kernel(grad, q, k, v, y, total, is_causal=ctx.causal)",
        "dq, dk, dv = kernel(grad, q, k, v, y, total, is_causal=True)",
        "Gradients of two-sided attention beside slots (joint pool, masked or encoder) are those of a causal mask.",
    ),
    (
        "model.py",
        "columns = self.pad(torch.cat((k.new_zeros(2), k.new_ones(2))))",
        "columns = self.pad(torch.cat((k.new_zeros(3), k.new_ones(1))))",
        "Slots under ALiBi take back only the shift of the position modulo 256, so they fade from position 256 on.",
    ),
    (
        "model.py",
        "(2 * (i - p) + 1) / (2 * p)",
        "(2 * (i - p) + 2) / (2 * p)",
        "ALiBi's slopes of the heads beyond a power of two repeat those of the first heads.",
    ),
    (
        "model.py",
        "angle = outer_angles(t, self.cfg.head_dim, self.cfg.rope_theta).repeat(1, 2)",
        "angle = outer_angles(t, self.cfg.head_dim, 10000.0).repeat(1, 2)",
        "The flag rope_theta does not reach RoPE's angles.",
    ),
    (
        "model.py",
        "scores = capped(q[..., :D] @ k[..., :D].mT * scale, softcap) + q[..., D:]",
        "scores = capped(q[..., :D] @ k[..., :D].mT, softcap) * scale + q[..., D:]",
        "The softcap of attention is applied before the scores are divided by sqrt(D), and is divided too.",
    ),
    (
        "model.py",
        "return n.total(s + n.after(self.attn(x, at) + self.mlp(x)))",
        "return n.total(s + n.after(self.attn(x, at)) + self.mlp(x))",
        "The norm behind a parallel block's branches (sandwich) covers attention alone and leaves the MLP out.",
    ),
    (
        "model.py",
        "return n2.total(self.g_skip * s + self.b_ff * n2.after(self.mlp(n2.before(s))))",
        "return n2.total(self.g_skip * s + n2.after(self.b_ff * self.mlp(n2.before(s))))",
        "The gain b_FF of a simplified block stands inside the sandwich norm, which divides it out again.",
    ),
    (
        "model.py",
        "place = place[..., None] + strides[dim] * torch.arange(start[dim], start[dim] + size[dim], device=device)",
        "place = place[..., None] + strides[dim] * torch.arange(size[dim], device=device)",
        "Initial weights of a part that begins at a later column repeat the first columns, so --tp changes them.",
    ),
    (
        "model.py",
        "return total, p.mul_(valid * slope).to(logits.dtype)",
        "return total, p.mul_(slope).to(logits.dtype)",
        "Targets of -1 have a gradient in the loss that goes chunk by chunk, though they are not in its value.",
    ),
    (
        "model.py",
        "idx, seen = idx[:, -self.cfg.block_size :], 0",
        "idx, seen = idx[:, 1 - self.cfg.block_size :], 0",
        "Texts beyond block_size are cropped to one token less than the context when decoding goes on.",
    ),
    (
        "model.py",
        'total += 6 * m.weight.numel() * (source if name.endswith(".kv") else queries)',
        "total += 6 * m.weight.numel() * queries",
        "The FLOPs of cross-attention's keys and values are counted per token of the text, not of the source.",
    ),
    (
        "model.py",
        "return self.encoder(*self.embed(source, 0, docs), docs) if given else None",
        "return self.encoder(*self.embed(source, 0), docs) if given else None",
        "The encoder's positions do not begin anew with each document under doc_positions.",
    ),
    (
        "model.py",
        "at._replace(docs=at.memory_docs)).view(q.shape)",
        "at._replace(docs=None)).view(q.shape)",
        "Cross-attention sees the memory of all documents under doc_mask.",
    ),
    (
        "model.py",
        "k = k.repeat_interleave(v.size(1) // k.size(1), dim=1)",
        "k = k.repeat(1, v.size(1) // k.size(1), 1, 1)",
        "Query heads of simplified blocks read the keys of another group under grouped-query attention.",
    ),
    # ---- engine/optim.py
    (
        "engine/optim.py",
        "progress = (step - cfg.warmup_iters) / (end - cfg.warmup_iters)",
        "progress = step / end",
        "The cosine counts the warm-up as part of its way, so the rate jumps down when the warm-up ends.",
    ),
    (
        "engine/optim.py",
        "max(1, end // 5)",
        "max(1, cfg.max_iters // 5)",
        "The default cooldown of wsd is a fifth of max_iters even where lr_decay_iters says when the schedule ends.",
    ),
    (
        "engine/optim.py",
        'groups[p.dim() >= 2 and not getattr(p, "no_decay", False)].append(p)',
        'groups[p.dim() == 2 and not getattr(p, "no_decay", False)].append(p)',
        "Learned slots, which have three dimensions, are left out of weight decay.",
    ),
    (
        "engine/optim.py",
        "max(1, rows / columns) ** 0.5",
        "max(1, columns / rows) ** 0.5",
        "Muon's updates are scaled up for wide matrices instead of for tall ones.",
    ),
    (
        "engine/optim.py",
        'torch._foreach_add_(updates, momentum, alpha=group["momentum"])',
        'torch._foreach_add_(updates, momentum, alpha=1 - group["momentum"])',
        "Nesterov's step of Muon weighs the momentum as little as the gradient, which differs from the second step on.",
    ),
    (
        "engine/optim.py",
        'getattr(m, "fused", None)',
        'getattr(m.weight, "fused", None)',
        "Muon orthogonalises the matrices that share a weight (q, k and v; gate and values) as a single one.",
    ),
    # ---- engine/replica.py
    (
        "engine/replica.py",
        "loss += part.detach()",
        "loss = part.detach() * micro_steps",
        "The logged loss is that of each step's last micro-batch alone.",
    ),
    (
        "engine/replica.py",
        "dict.fromkeys(self.uncut, 1 / math.sqrt(cfg.tp))",
        "dict.fromkeys(self.uncut, 1 / cfg.tp)",
        "The gradient norm under tp, which clipping uses, counts parameters that all ranks have too little.",
    ),
    (
        "engine/replica.py",
        'if p.grad is not None], "shard", 1 / n)',
        'if p.grad is not None], "shard", 1.0)',
        "Gradients of several pipelines beside one another are summed instead of averaged.",
    ),
    # ---- engine/parallel.py, context.py, pipeline.py, tensor.py
    (
        "engine/parallel.py",
        "data_rank = rank // (cfg.cp * cfg.tp) % data",
        "data_rank = rank // cfg.tp % data",
        "The ranks of a context-parallel group read different samples as soon as there are two such groups.",
    ),
    (
        "engine/context.py",
        "torch.where(t < size, front, back - 1)",
        "torch.where(t <= size, front, back - 1)",
        "The first token of a rank's second piece has a wrong position under cp.",
    ),
    (
        "engine/pipeline.py",
        'model.copies = {"wte.weight"} if last and tied else set()',
        'model.copies = {"head.weight"} if last and tied else set()',
        "The tied weight, which both ends of a pipeline have, is counted twice in the gradient norm.",
    ),
    (
        "engine/tensor.py",
        "return F.linear(x, layer.weight, layer.bias / n)",
        "return F.linear(x, layer.weight, layer.bias)",
        "The bias of a row-parallel layer is added once by every rank under tp.",
    ),
    # ---- engine/checkpoint.py, dcp_reader.py, folder.py
    (
        "engine/checkpoint.py",
        "steps = [path for path in _steps(out_dir) if int(path.name[5:]) <= int(final.name[5:])]",
        "steps = _steps(out_dir)",
        "Pruning counts later steps of a rewound run among the newest, and deletes an older one that was to stay.",
    ),
    (
        "engine/dcp_reader.py",
        "sum(prod(sizes) for _, sizes in boxes) == prod(shape)",
        "sum(prod(sizes) for _, sizes in boxes) <= prod(shape)",
        "A table of tensors that lacks a shard is taken for whole, and the rest of the tensor is not loaded.",
    ),
    (
        "engine/folder.py",
        "if self._is_at_path():  # not the one of a run that has come after somebody deleted the folder",
        "if self.path.exists():",
        "A run that ends removes the lock of another one, which made the folder again after it was deleted.",
    ),
    # ---- engine/metrics.py, costs.py, plan.py, memory.py, interchange.py
    (
        "engine/metrics.py",
        'if json.loads(line)["step"] < step:',
        'if json.loads(line)["step"] <= step:',
        "A resume keeps the lines of the step that it starts with, and writes its evaluation a second time.",
    ),
    (
        "engine/costs.py",
        "sequence = blocks * RECOMPUTE[cfg.activation_checkpoint] + self.head_flops * stage.last",
        "sequence = (blocks + self.head_flops * stage.last) * RECOMPUTE[cfg.activation_checkpoint]",
        "The plan counts the head as recomputed together with the blocks.",
    ),
    (
        "engine/plan.py",
        "(compute + rest) * (cfg.pp - 1) / r.micro_steps",
        "(compute + rest) * (cfg.pp - 1) / (r.micro_steps + cfg.pp - 1)",
        "The pipeline's bubble is planned as a share of the whole step but taken of its busy part, so it is too short.",
    ),
    (
        "engine/memory.py",
        "cut = ranks.size // cfg.dp_replicate if fsdp else cfg.tp * cfg.pp",
        "cut = ranks.size if fsdp else cfg.tp * cfg.pp",
        "The least memory of a run under HSDP is estimated as if the copies shared one set of shards.",
    ),
    (
        "engine/interchange.py",
        'if ".qkv." in name:',
        'if name.endswith(".qkv.weight"):',
        "The bias of q, k and v of an imported nanoGPT checkpoint stays in nanoGPT's order.",
    ),
    # ---- data
    (
        "data/loader.py",
        "return permute(samples % n, n, mix(stream_key + (samples // n).astype(np.uint64)))",
        "return permute(samples % n, n, mix(stream_key))",
        "All epochs visit the windows in the same order.",
    ),
    (
        "data/loader.py",
        "draws(samples, self.seed)",
        "draws(samples, 0)",
        "The corruption of training samples does not depend on the seed.",
    ),
    (
        "data/loader.py",
        "if w * (i + 1) > period * counts[j]]",
        "if w * (i + 1) >= period * counts[j]]",
        "A source of a mixture of three or more can be a whole sample ahead of its share.",
    ),
    (
        "data/loader.py",
        "windows = order(windows - n, n, seed)",
        "windows = order(windows, n, seed)",
        "The training loss is evaluated on the very windows that training reads first.",
    ),
    (
        "data/loader.py",
        "draws(filled, -1)",
        "draws(filled, seed)",
        "The corruption of the validation set depends on the run's seed.",
    ),
    (
        "data/objective.py",
        "share < 0.9 * 2**32",
        "share < 0.1 * 2**32",
        "The tokens to restore of a masked model are never replaced by a random one: a fifth of them stay.",
    ),
    (
        "data/objective.py",
        "self.documents(window.numpy()[:, :-1])",
        "self.documents(window.numpy()[:, 1:])",
        "Document numbers of a causal model are those of its targets, so a document's last token belongs to the next.",
    ),
    (
        "data/shards.py",
        "Fraction(max(1, round(MIXING * w / sum(weights))))",
        "Fraction(round(MIXING * w / sum(weights)))",
        "A source of a mixture with a very small weight is never drawn.",
    ),
    (
        "data/tokenizer.py",
        "lengths[self.eot] = 0",
        "lengths[self.eot] = 1",
        "An end-of-text counts as a byte of text in bits per byte.",
    ),
    (
        "data/writer.py",
        'shard["max_token"] = max(shard["max_token"], int(part.max()))',
        'shard["max_token"] = int(part.max())',
        "The largest token id on record for a shard is that of its last document.",
    ),
    (
        "data/corpus.py",
        "[out.tokenizer.encode(text), *eot] if ends else",
        "[out.tokenizer.encode(text), *eot] if begins else",
        "A document that is encoded in several pieces has its end-of-text behind the first one.",
    ),
    (
        "data/corpus.py",
        "job.place = (file, row, number + 1) if done == len(text) else None",
        "job.place = (file, row, number) if done == len(text) else None",
        "A preparation that goes on numbers its documents from one too low, so others of them validate.",
    ),
    # ---- train.py
    (
        "train.py",
        """                replica.model.eval()
                of_train = evaluate(streams["train"], cfg.eval_iters or val_batches)
""",
        """                of_train = evaluate(streams["train"], cfg.eval_iters or val_batches)
                replica.model.eval()
""",
        "The training loss is evaluated with dropout, whose draws also move those of the training that follows.",
    ),
    (
        "train.py",
        "best = val_loss if improved else best",
        "best = val_loss",
        "A validation loss counts as the best one when it is lower than the one before it.",
    ),
    (
        "train.py",
        "tensors = run_tensors(replica, optimizer) | random\n",
        "tensors = run_tensors(replica, optimizer)\n",
        "A resume does not restore the state of the random numbers, so dropout differs from the undisturbed run's.",
    ),
    (
        "train.py",
        "samples += samples_per_step",
        "samples += samples_per_step * bool(finite)",
        "A step that is left out does not count its samples, so a resume reads some of the data again.",
    ),
    (
        "train.py",
        "lr = optim.learning_rate(step, cfg)",
        "lr = optim.learning_rate(step + 1, cfg)",
        "Each step has the learning rate of the step after it.",
    ),
    (
        "train.py",
        "scaler.load_state_dict(saved)",
        'scaler.load_state_dict(scaler.state_dict() | {"scale": saved["scale"]})',
        "A resume restores the gradient scaler's scale, but not how many good steps it has counted.",
    ),
    (
        "train.py",
        "worth_saving = step > 0 and (improved or cfg.always_save_checkpoint)",
        "worth_saving = step > 0 and improved or cfg.always_save_checkpoint",
        "A checkpoint is written before the first step, where there is nothing to save.",
    ),
    # ---- sample.py
    (
        "sample.py",
        "over = (before >= cfg.top_p * ordered.sum(-1, keepdim=True)) & (before > 0)",
        "over = (before + ordered >= cfg.top_p * ordered.sum(-1, keepdim=True)) & (before > 0)",
        "Sampling with top_p drops the token with which the sum first reaches p.",
    ),
    (
        "sample.py",
        "    return p.masked_fill(p < cfg.min_p * p.amax(dim=-1, keepdim=True), 0)",
        "    q = torch.softmax(logits, dim=-1)\n"
        "    return p.masked_fill(q < cfg.min_p * q.amax(dim=-1, keepdim=True), 0)",
        "Sampling with min_p compares the probabilities from before the temperature.",
    ),
    (
        "sample.py",
        "scaled = scaled.masked_fill(logits < least, -torch.inf)",
        "scaled = logits.masked_fill(logits < least, -torch.inf)",
        "The temperature has no effect while top_k leaves tokens out.",
    ),
]
