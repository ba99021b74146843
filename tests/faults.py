"""Faults to plant, one at a time: each changes what the program computes and none stops it, so only a test can tell.

FAULTS holds tuples (file, old, new, what, tests): `old` stands exactly once in `file`, a path from the root, `new`
takes its place, `what` says which behaviour is wrong then, and `tests`, pytest's arguments, see it. The faults were
drafted from the code alone, before the tests were written that close the gaps that they found.
"""

FAULTS = [
    # ---- model.py
    (
        "model.py",
        "lo, hi = (i - self.window + 1).clamp(min=0), hi.minimum(i + self.window)",
        "lo, hi = (i - self.window + 1).clamp(min=0), hi.minimum(i + self.window + 1)",
        "Sliding windows that look both ways (masked models, encoders) see one key too many behind the query.",
        "tests/test_model.py::test_mix_equals_naive_attention_under_every_mask",
    ),
    (
        "model.py",
        "band = (j > i) & (j <= i + W)",
        "band = (j >= i) & (j <= i + W)",
        "Sliding windows on the fused causal path hold W + 1 keys from the second block of queries on.",
        "tests/test_model.py::test_mix_equals_naive_attention",
    ),
    (
        "model.py",
        "return v[:, :, -mask.window :].mean(dim=2, keepdim=True)",
        "return v.mean(dim=2, keepdim=True)",
        "Simplified blocks' content-free attention ignores the window in cached decoding, and there only.",
        "tests/test_model.py::test_grid",
    ),
    (
        "model.py",
        "dq, dk, dv = kernel(grad, q, k, v, y, total, dropout_p=0.0, is_causal=ctx.causal)",
        "dq, dk, dv = kernel(grad, q, k, v, y, total, dropout_p=0.0, is_causal=True)",
        "Gradients of two-sided attention beside slots (joint pool, masked or encoder) are those of a causal mask.",
        "tests/test_model.py::test_mix_equals_naive_attention_under_every_mask",
    ),
    (
        "model.py",
        "columns = self.pad(torch.cat((k.new_zeros(2), k.new_ones(2))))",
        "columns = self.pad(torch.cat((k.new_zeros(3), k.new_ones(1))))",
        "Slots under ALiBi take back only the shift of the position modulo 256, so they fade from position 256 on.",
        "tests/test_blocks.py::test_alibi_beside_slots_in_a_long_text",
    ),
    (
        "model.py",
        "(2 * (i - p) + 1) / (2 * p)",
        "(2 * (i - p) + 2) / (2 * p)",
        "ALiBi's slopes of the heads beyond a power of two repeat those of the first heads.",
        "tests/test_model.py::test_alibi_slopes",
    ),
    (
        "model.py",
        "angle = outer_angles(t, self.cfg.head_dim, self.cfg.rope_theta).repeat(1, 2)",
        "angle = outer_angles(t, self.cfg.head_dim, 10000.0).repeat(1, 2)",
        "The flag rope_theta does not reach RoPE's angles.",
        "tests/test_model.py::test_rope_is_relative_and_applied",
    ),
    (
        "model.py",
        "scores = capped(q[..., :D] @ k[..., :D].mT * scale, cap) + q[..., D:]",
        "scores = capped(q[..., :D] @ k[..., :D].mT, cap) * scale + q[..., D:]",
        "The softcap of attention is applied before the scores are divided by sqrt(D), and is divided too.",
        "tests/test_model.py::test_mix_equals_naive_attention",
    ),
    (
        "model.py",
        "y = self.after(reduce(add, y))",
        "y = reduce(add, y[1:], self.after(y[0]))",
        "The norm behind a parallel block's branches (sandwich) covers attention alone and leaves the MLP out.",
        "tests/test_blocks.py::test_norms_around_branches_and_gains",
    ),
    (
        "model.py",
        """        y = self.after(reduce(add, y))
        if self.gain is not None:
            y = self.gain(y)
""",
        """        y = reduce(add, y)
        if self.gain is not None:
            y = self.gain(y)
        y = self.after(y)
""",
        "The gain b_FF of a simplified block stands inside the sandwich norm, which divides it out again.",
        "tests/test_blocks.py::test_norms_around_branches_and_gains",
    ),
    (
        "model.py",
        "place = place[..., None] + strides[dim] * torch.arange(start[dim], start[dim] + size[dim], device=device)",
        "place = place[..., None] + strides[dim] * torch.arange(size[dim], device=device)",
        "Initial weights of a part that begins at a later column repeat the first columns, so --tp changes them.",
        "tests/test_model.py::test_a_part_of_the_initial_weights_is_that_part_of_the_whole",
    ),
    (
        "model.py",
        "return total, p.mul_(valid * slope).to(logits.dtype)",
        "return total, p.mul_(slope).to(logits.dtype)",
        "Targets of -1 have a gradient in the loss that goes chunk by chunk, though they are not in its value.",
        "tests/test_model.py::test_chunked_loss_equals_the_whole",
    ),
    (
        "model.py",
        "idx, seen = idx[:, -self.cfg.block_size :], 0",
        "idx, seen = idx[:, 1 - self.cfg.block_size :], 0",
        "Texts beyond block_size are cropped to one token less than the context when decoding goes on.",
        "tests/test_model.py::test_grid",
    ),
    (
        "engine/accounting.py",
        'total += 6 * m.weight.numel() * (source if m.role == "memory" else tokens)',
        "total += 6 * m.weight.numel() * tokens",
        "The FLOPs of cross-attention's keys and values are counted per token of the text, not of the source.",
        "tests/test_model.py::test_parameters_and_flops_of_an_encoder_and_decoder_counted_by_hand",
    ),
    (
        "model.py",
        "return self.encoder.stream(*self.embed(source, 0, docs), docs) if given else None",
        "return self.encoder.stream(*self.embed(source, 0), docs) if given else None",
        "The encoder's positions do not begin anew with each document under doc_positions.",
        "tests/test_objective.py::test_a_packed_document_is_as_if_alone",
    ),
    (
        "model.py",
        "inputs._replace(docs=inputs.memory_docs)",
        "inputs._replace(docs=None)",
        "Cross-attention sees the memory of all documents under doc_mask.",
        "tests/test_objective.py::test_a_packed_document_is_as_if_alone",
    ),
    (
        "model.py",
        "k = k.repeat_interleave(v.size(1) // k.size(1), dim=1)",
        "k = k.repeat(1, v.size(1) // k.size(1), 1, 1)",
        "Query heads of simplified blocks read the keys of another group under grouped-query attention.",
        "tests/test_blocks.py::test_shaped_attention_equals_its_matrices",
    ),
    # ---- engine/optim.py
    (
        "engine/optim.py",
        "progress = (step - cfg.warmup_iters) / (end - cfg.warmup_iters)",
        "progress = step / end",
        "The cosine counts the warm-up as part of its way, so the rate jumps down when the warm-up ends.",
        "tests/test_optim.py::test_cosine_is_nanogpts",
    ),
    (
        "engine/optim.py",
        "max(1, end // 5)",
        "max(1, cfg.max_iters // 5)",
        "The default cooldown of wsd is a fifth of max_iters even where lr_decay_iters says when the schedule ends.",
        "tests/test_optim.py::test_defaults_derive_from_max_iters",
    ),
    (
        "engine/optim.py",
        'groups[p.dim() >= 2 and not getattr(p, "no_decay", False)].append(p)',
        'groups[p.dim() == 2 and not getattr(p, "no_decay", False)].append(p)',
        "Learned slots, which have three dimensions, are left out of weight decay.",
        "tests/test_optim.py::test_slots_decay",
    ),
    (
        "engine/optim.py",
        "max(1, rows / columns) ** 0.5",
        "max(1, columns / rows) ** 0.5",
        "Muon's updates are scaled up for wide matrices instead of for tall ones.",
        "tests/test_optim.py::test_muon_equals_separate_matrices",
    ),
    (
        "engine/optim.py",
        'torch._foreach_add_(updates, momentum, alpha=group["momentum"])',
        'torch._foreach_add_(updates, momentum, alpha=1 - group["momentum"])',
        "Nesterov's step of Muon weighs the momentum as little as the gradient, which differs from the second step on.",
        "tests/test_optim.py::test_muon_equals_separate_matrices",
    ),
    (
        "engine/optim.py",
        "return {m.weight: m.fused for m in model.modules()",
        "return {m.weight: None for m in model.modules()",
        "Muon orthogonalises the matrices that share a weight (q, k and v; gate and values) as a single one.",
        "tests/test_optim.py::test_who_gets_muon",
    ),
    # ---- engine/sharded_model.py
    (
        "engine/sharded_model.py",
        "loss += part.detach()",
        "loss = part.detach() * micro_steps",
        "The logged loss is that of each step's last micro-batch alone.",
        "tests/test_oracle.py",
    ),
    (
        "engine/sharded_model.py",
        "dict.fromkeys(self.tp_replicated, 1 / math.sqrt(cfg.tp))",
        "dict.fromkeys(self.tp_replicated, 1 / cfg.tp)",
        "The gradient norm under tp, which clipping uses, counts parameters that all ranks have too little.",
        "tests/test_layouts.py::test_losses_do_not_depend_on_the_layout[tp-models]",
    ),
    (
        "engine/sharded_model.py",
        'if p.grad is not None], "shard", 1 / n)',
        'if p.grad is not None], "shard", 1.0)',
        "Gradients of several pipelines beside one another are summed instead of averaged.",
        "tests/test_layouts.py::test_losses_do_not_depend_on_the_layout[ddp+pp-blocks]",
    ),
    # ---- engine/parallel.py, context_parallel.py, pipeline.py, tensor_parallel.py
    (
        "engine/parallel.py",
        "data_rank = rank // (cfg.cp * cfg.tp) % data",
        "data_rank = rank // cfg.tp % data",
        "The ranks of a context-parallel group read different samples as soon as there are two such groups.",
        "tests/test_layouts.py::test_losses_do_not_depend_on_the_layout[fsdp+cp-blocks]",
    ),
    (
        "engine/context_parallel.py",
        "torch.where(t < size, front, back - 1)",
        "torch.where(t <= size, front, back - 1)",
        "The first token of a rank's second piece has a wrong position under cp.",
        "tests/test_layouts.py::test_losses_do_not_depend_on_the_layout[cp-blocks]",
    ),
    (
        "engine/pipeline.py",
        'model.copies = {"wte.weight"} if last and tied else set()',
        'model.copies = {"head.weight"} if last and tied else set()',
        "The tied weight, which both ends of a pipeline have, is counted twice in the gradient norm.",
        "tests/test_layouts.py::test_losses_do_not_depend_on_the_layout[pp-blocks]",
    ),
    (
        "engine/tensor_parallel.py",
        "return F.linear(x, layer.weight, layer.bias / n)",
        "return F.linear(x, layer.weight, layer.bias)",
        "The bias of a row-parallel layer is added once by every rank under tp.",
        "tests/test_layouts.py::test_losses_do_not_depend_on_the_layout[tp-models]",
    ),
    # ---- engine/checkpoint.py, dcp_reader.py, folder.py
    (
        "engine/checkpoint.py",
        'steps = [path for path in steps_in(out_dir) if step_of(path) <= state["step"]]',
        "steps = steps_in(out_dir)",
        "Pruning counts later steps of a rewound run among the newest, and deletes an older one that was to stay.",
        "tests/test_checkpoint.py::test_pointers_and_pruning",
    ),
    (
        "engine/dcp_reader.py",
        "sum(prod(sizes) for _, sizes in boxes) == prod(shape)",
        "sum(prod(sizes) for _, sizes in boxes) <= prod(shape)",
        "A table of tensors that lacks a shard is taken for whole, and the rest of the tensor is not loaded.",
        "tests/test_checkpoint.py::test_shards_that_lie_are_refused",
    ),
    (
        "engine/folder.py",
        "if self._is_at_path():  # otherwise it is the file of a run that began after the folder was deleted",
        "if self.path.exists():",
        "A run that ends removes the lock of another one, which made the folder again after it was deleted.",
        "tests/test_folder.py::test_the_end_of_a_run_leaves_the_lock_of_the_next",
    ),
    # ---- engine/metrics.py, costs.py, plan.py, memory.py, interchange.py
    (
        "engine/metrics.py",
        'if json.loads(line)["step"] < step:',
        'if json.loads(line)["step"] <= step:',
        "A resume keeps the lines of the step that it starts with, and writes its evaluation a second time.",
        "tests/test_metrics.py::test_resume_leaves_what_the_uninterrupted_run_leaves",
    ),
    (
        "engine/costs.py",
        "sequence = blocks * RECOMPUTE[cfg.activation_checkpoint] + self.head_flops * stage.last",
        "sequence = (blocks + self.head_flops * stage.last) * RECOMPUTE[cfg.activation_checkpoint]",
        "The plan counts the head as recomputed together with the blocks.",
        "tests/test_plan.py",
    ),
    (
        "engine/plan.py",
        "(compute + rest) * (cfg.pp - 1) / layout.micro_steps",
        "(compute + rest) * (cfg.pp - 1) / (layout.micro_steps + cfg.pp - 1)",
        "The pipeline's bubble is planned as a share of the whole step but taken of its busy part, so it is too short.",
        "tests/test_plan.py::test_a_pipeline_waits",
    ),
    (
        "engine/memory.py",
        "cut = ranks.size // cfg.dp_replicate if fsdp else cfg.tp * cfg.pp",
        "cut = ranks.size if fsdp else cfg.tp * cfg.pp",
        "The least memory of a run under HSDP is estimated as if the copies shared one set of shards.",
        "tests/test_memory.py::test_copies_of_the_shards_do_not_share_them",
    ),
    (
        "engine/interchange.py",
        'if ".qkv." in name:',
        'if name.endswith(".qkv.weight"):',
        "The bias of q, k and v of an imported nanoGPT checkpoint stays in nanoGPT's order.",
        "tests/test_interchange.py::test_logits_equal_gpt2_written_out",
    ),
    # ---- data
    (
        "data/loader.py",
        "return permute(samples % n, n, hash64(stream_key + (samples // n).astype(np.uint64)))",
        "return permute(samples % n, n, hash64(stream_key))",
        "All epochs visit the windows in the same order.",
        "tests/test_loader.py::test_epochs_and_seeds_differ",
    ),
    (
        "data/loader.py",
        "corruption_keys(samples, self.seed)",
        "corruption_keys(samples, 0)",
        "The corruption of training samples does not depend on the seed.",
        "tests/test_loader.py::test_the_seed_reaches_what_is_corrupted",
    ),
    (
        "data/loader.py",
        "if w * (i + 1) > period * counts[j]]",
        "if w * (i + 1) >= period * counts[j]]",
        "A source of a mixture of three or more can be a whole sample ahead of its share.",
        "tests/test_loader.py::test_every_prefix_of_a_mixture_has_its_shares",
    ),
    (
        "data/loader.py",
        "windows = order(windows - n, n, seed)",
        "windows = order(windows, n, seed)",
        "The training loss is evaluated on the very windows that training reads first.",
        "tests/test_loader.py::test_the_training_loss_is_not_of_what_training_reads_first",
    ),
    (
        "data/loader.py",
        "corruption_keys(filled, -1)",
        "corruption_keys(filled, seed)",
        "The corruption of the validation set depends on the run's seed.",
        "tests/test_loader.py::test_a_window_is_corrupted_in_one_way_in_every_evaluation",
    ),
    (
        "data/objective.py",
        "uniform < 0.9 * 2**32",
        "uniform < 0.1 * 2**32",
        "The tokens to restore of a masked model are never replaced by a random one: a fifth of them stay.",
        "tests/test_objective.py::test_what_stands_in_the_place_of_a_target",
    ),
    (
        "data/objective.py",
        "self.documents(window.numpy()[:, :-1])",
        "self.documents(window.numpy()[:, 1:])",
        "Document numbers of a causal model are those of its targets, so a document's last token belongs to the next.",
        "tests/test_objective.py::test_causal_is_the_window_itself",
    ),
    (
        "data/shards.py",
        "Fraction(max(1, round(MIXTURE_STEPS * w / sum(weights))))",
        "Fraction(round(MIXTURE_STEPS * w / sum(weights)))",
        "A source of a mixture with a very small weight is never drawn.",
        "tests/test_shards.py::test_a_mixture_is_its_sources_and_their_weights",
    ),
    (
        "data/tokenizer.py",
        "lengths[self.eot] = 0",
        "lengths[self.eot] = 1",
        "An end-of-text counts as a byte of text in bits per byte.",
        "tests/test_tokenizer.py::test_byte_lengths_count_the_text",
    ),
    (
        "data/writer.py",
        'shard["max_token"] = max(shard["max_token"], int(part.max()))',
        'shard["max_token"] = int(part.max())',
        "The largest token id on record for a shard is that of its last document.",
        "tests/test_shards.py::test_the_largest_id_of_a_shard_may_be_of_any_document",
    ),
    (
        "data/corpus.py",
        "[out.tokenizer.encode(text), *eot] if ends else",
        "[out.tokenizer.encode(text), *eot] if begins else",
        "A document that is encoded in several pieces has its end-of-text behind the first one.",
        "tests/test_corpus.py::test_formats_equal_a_naive_loop",
    ),
    (
        "data/corpus.py",
        "job.place = (file, row, number + 1) if done == len(text) else None",
        "job.place = (file, row, number) if done == len(text) else None",
        "A preparation that goes on numbers its documents from one too low, so others of them validate.",
        "tests/test_corpus.py::test_killed_at_any_write_the_result_is_the_same",
    ),
    # ---- train.py
    (
        "train.py",
        """            model.eval()
            of_train = self.mean_loss(self.streams["train"], cfg.eval_iters or self.val_batches)
""",
        """            of_train = self.mean_loss(self.streams["train"], cfg.eval_iters or self.val_batches)
            model.eval()
""",
        "The training loss is evaluated with dropout, whose draws also move those of the training that follows.",
        "tests/test_train.py::test_resume_is_exact",
    ),
    (
        "train.py",
        """                if is_best and not worth_saving:  # before the first step there is nothing to save
                    checkpoints.best_loss = val_loss
""",
        "                checkpoints.best_loss = val_loss\n",
        "A validation loss counts as the best one when it is lower than the one before it.",
        "tests/test_train.py::test_the_best_checkpoint_stays_when_validation_worsens",
    ),
    (
        "engine/run_state.py",
        "tensors = run_tensors(sharded, optimizer) | random\n",
        "tensors = run_tensors(sharded, optimizer)\n",
        "A resume does not restore the state of the random numbers, so dropout differs from the undisturbed run's.",
        "tests/test_train.py::test_resume_is_exact",
    ),
    (
        "train.py",
        "self.samples += self.samples_per_step",
        "self.samples += self.samples_per_step * bool(finite)",
        "A step that is left out does not count its samples, so a resume reads some of the data again.",
        "tests/test_train.py::test_skip_nonfinite",
    ),
    (
        "train.py",
        "lr = optim.learning_rate(run.step, cfg)",
        "lr = optim.learning_rate(run.step + 1, cfg)",
        "Each step has the learning rate of the step after it.",
        "tests/test_oracle.py",
    ),
    (
        "engine/run_state.py",
        "scaler.load_state_dict(saved)",
        'scaler.load_state_dict(scaler.state_dict() | {"scale": saved["scale"]})',
        "A resume restores the gradient scaler's scale, but not how many good steps it has counted.",
        "tests/test_errors.py::test_a_gradient_scaler_of_another_run",
    ),
    (
        "train.py",
        "worth_saving = run.step > 0 and (is_best or cfg.always_save_checkpoint)",
        "worth_saving = run.step > 0 and is_best or cfg.always_save_checkpoint",
        "A checkpoint is written before the first step, where there is nothing to save.",
        "tests/test_train.py::test_nothing_is_saved_before_the_first_step",
    ),
    # ---- sample.py
    (
        "sample.py",
        "over = (before >= cfg.top_p * ordered.sum(-1, keepdim=True)) & (before > 0)",
        "over = (before + ordered >= cfg.top_p * ordered.sum(-1, keepdim=True)) & (before > 0)",
        "Sampling with top_p drops the token with which the sum first reaches p.",
        "tests/test_sample.py::test_choose tests/test_sample.py::test_the_distribution_is_that_of_transformers",
    ),
    (
        "sample.py",
        "    return p.masked_fill(p < cfg.min_p * p.amax(dim=-1, keepdim=True), 0)",
        "    q = torch.softmax(logits, dim=-1)\n"
        "    return p.masked_fill(q < cfg.min_p * q.amax(dim=-1, keepdim=True), 0)",
        "Sampling with min_p compares the probabilities from before the temperature.",
        "tests/test_sample.py::test_the_distribution_is_that_of_transformers",
    ),
    (
        "sample.py",
        "scaled = scaled.masked_fill(logits < least, -torch.inf)",
        "scaled = logits.masked_fill(logits < least, -torch.inf)",
        "The temperature has no effect while top_k leaves tokens out.",
        "tests/test_sample.py::test_the_distribution_is_that_of_transformers",
    ),
]
