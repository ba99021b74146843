"""Faults to plant, one at a time: each changes what the program computes and none stops it, so only a test can tell.

TEXT has for each fault: its file, a path from the root, perhaps with a function or class in it, and which behaviour is
wrong then; behind "- " what stands once in that file or function, and behind "+ " what takes its place. A few words of
a function are enough, so renames elsewhere do not touch them. Below one or more faults are pytest's arguments for the
tests that see them.
"""

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

TEXT = r"""
ops.py:Mask.visible_range: Sliding windows that look both ways see one key too many behind the query.
  - i + self.window
  + i + self.window + 1
  tests/model/test_ops.py::test_attention_equals_naive_attention_under_every_mask
ops.py:attention_products_backward: Weights that are computed again in the backward see one key of the future.
  - strip_weights(q, k, lo, hi, rows
  + strip_weights(q, k, lo, hi + 1, rows
  tests/model/test_ops.py::test_products_beyond_the_weights_that_are_kept
ops.py:strip_weights: In attention by products, documents see those before them, but for a strip's own keys.
  - and lo.dim() == 1
  + and lo.dim()
  tests/model/test_ops.py::test_attention_equals_naive_attention_under_every_mask
ops.py:LinearOfOneDNN.backward: Where oneDNN multiplies, gradients of weights come from the first text alone.
  - grad.flatten(0, -2).mT, x.flatten(0, -2).mT
  + grad[:1].flatten(0, -2).mT, x[:1].flatten(0, -2).mT
  tests/model/test_ops.py::test_onednn_multiplies_as_in_float64
ops.py:flash_attention: FlashAttention's windows hold W + 1 keys, and without a window a query sees one key before it.
  - mask.window - 1
  + mask.window
  tests/model/test_flash.py::test_flash_equals_naive_attention
engine/decode.py: Texts beyond block_size are cropped to one token less than the context when decoding goes on.
  -                 new = text
  +                 new = text[:, 1:]
  tests/model/test_naive.py
model.py:Rope.table: The flag rope_theta does not reach RoPE's angles.
  - cfg.rope_theta,
  + 10000.0,
  tests/model/test_references.py::test_model_equals_hugging_face[cohere2]
ops.py:normal: Initial weights of a part that begins at a later column repeat the first columns, so --tp changes them.
  - arange(start[dim], start[dim] + size[dim],
  + arange(size[dim],
  tests/model/test_ops.py::test_a_part_of_the_initial_weights_is_that_part_of_the_whole
ops.py:chunk_loss: Targets of -1 have a gradient in the loss that goes chunk by chunk, though they are not in its value.
  - mul_(valid * slope)
  + mul_(slope)
  tests/model/test_naive.py
model.py:Model.encode: The encoder's positions do not begin anew with each document under doc_positions.
  - source, 0, docs
  + source, 0
  tests/data/test_objective.py::test_a_packed_document_is_as_if_alone
ops.py: The centring matrix of shaped attention is not masked causally, so the future leaks.
  -     lo, hi = mask.visible_range(T, S, v.device)
  -     if mask.docs is None and mask.causal and not 0 < mask.window < S:
  +     lo, hi = mask._replace(causal=False).visible_range(T, S, v.device)
  +     if False:
  tests/model/test_naive.py
engine/optim.py: Muon's updates are scaled up for wide matrices instead of for tall ones.
  - max(1, rows / columns) ** 0.5
  + max(1, columns / rows) ** 0.5
  tests/training/test_optim.py::test_muon_splits_what_the_model_computes_with
engine/parallel/sharded.py: The logged loss is that of each step's last micro-batch alone.
  - loss += part.detach()
  + loss = part.detach() * micro_steps
  tests/training/test_oracle.py::test_a_run_equals_the_oracles
engine/parallel/sharded.py: The gradient norm under tp, by which clipping goes, counts what all ranks have too little.
  - copies = math.prod(n for n, dim in cuts if dim is None)
  + copies = math.prod(n**2 for n, dim in cuts if dim is None)
  tests/parallel/test_layouts.py::test_losses_do_not_depend_on_the_layout[pairs]
engine/parallel/tensor.py: The bias of a row-parallel layer is added once by every rank under tp.
  - bias = layer.bias / n
  + bias = layer.bias
engine/parallel/tensor.py: Under tp, normalisers are added that the ranks' slices have relative to other maxima.
  - normaliser * (largest - most).exp()
  + normaliser
  tests/parallel/test_gradients.py::test_every_flag_has_its_gradients_on_every_layout
engine/parallel/ranks.py: Ranks of a context-parallel group read different samples if there are two such groups.
  - data_rank = place.rank // (cfg.cp * cfg.tp) % data
  + data_rank = place.rank // cfg.tp % data
engine/parallel/sharded.py: Under --ep, the gradients of experts are sums over the ranks that divide them.
  - torch._foreach_mul_(grads, 1 / self.cfg.ep)
  + torch._foreach_mul_(grads, 1.0)
  tests/parallel/test_layouts.py::test_losses_do_not_depend_on_the_layout[meshes]
engine/parallel/context.py: Under cp, the queries of every piece have the documents of a text's beginning.
  - parts = [docs[:, begin:end], docs[:, :end]]
  + parts = [docs[:, : end - begin], docs[:, :end]]
engine/parallel/context.py: The first token of a rank's second piece has a wrong position under cp.
  - torch.where(t < size, front, back - 1)
  + torch.where(t <= size, front, back - 1)
  tests/parallel/test_layouts.py::test_losses_do_not_depend_on_the_layout[pairs]
engine/checkpoint/files.py: Pruning counts later steps of a rewound run among the newest, so an older one goes.
  - steps = [path for path in steps_in(out_dir) if step_of(path) <= state["step"]]
  + steps = steps_in(out_dir)
  tests/checkpoint/test_checkpoint.py::test_pointers_and_pruning
engine/checkpoint/file_format.py: An index that lacks a piece is taken for whole, and not all of the tensor is loaded.
  - require(complete == math.prod(saved.shape),
  + require(complete <= math.prod(saved.shape),
  tests/checkpoint/test_checkpoint.py::test_shards_that_lie_are_refused
engine/metrics.py: A resume keeps the lines of the step that it starts with, and writes its evaluation a second time.
  - if row["step"] < step]
  + if row["step"] <= step]
  tests/training/test_metrics.py::test_resume_leaves_what_the_uninterrupted_run_leaves
engine/interchange/huggingface.py: The bias of q, k and v of an imported nanoGPT checkpoint stays in nanoGPT's order.
  - x = conversion.read(x, self.cfg, self.config)
  + x = conversion.read(x, self.cfg, self.config) if x.dim() > 1 else x
  tests/interchange/test_nanogpt.py::test_logits_equal_gpt2s
data/loader.py: All epochs visit the windows in the same order.
  - return permute(samples % n, n, hash64(stream_key + (samples // n).astype(np.uint64)))
  + return permute(samples % n, n, hash64(stream_key))
  tests/data/test_loader.py::test_ranks_and_resumes_change_nothing
data/loader.py: The training loss is evaluated on the very windows that training reads first.
  - windows = order(np.arange(min(n, n_batches * batch_size)) - n, n, seed)
  + windows = order(np.arange(min(n, n_batches * batch_size)), n, seed)
  tests/data/test_loader.py::test_evaluations_are_the_oracles
data/objective.py: The tokens to restore of a masked model are never replaced by a random one: a fifth of them stay.
  - uniform < 0.9 * 2**32
  + uniform < 0.1 * 2**32
  tests/data/test_objective.py::test_what_stands_in_the_place_of_a_target
data/objective.py: Document numbers of causal models are those of targets, so each last token is the next's.
  - self.documents(window.numpy()[:, :-1])
  + self.documents(window.numpy()[:, 1:])
  tests/data/test_objective.py::test_a_batch_is_the_oracles
data/corpus.py: A preparation that goes on numbers its documents from one too low, so others of them validate.
  - self.out.save((document.file, document.row, document.number + 1))
  + self.out.save((document.file, document.row, document.number))
  tests/data/test_corpus.py::test_killed_at_any_write_the_result_is_the_same
engine/evaluation.py: The training loss is evaluated with dropout, whose draws move those of the training after it.
  -         self.sharded.model.eval()
  -         of_train = self.loss("train", self.cfg.eval_iters or min(val_batches, 100), stop)
  +         of_train = self.loss("train", self.cfg.eval_iters or min(val_batches, 100), stop)
  +         self.sharded.model.eval()
  tests/training/test_train.py::test_resume_is_exact
engine/checkpoint/saver.py: A validation loss counts as the best one when it is lower than the one before it.
  - if self.best_loss is not None and val_loss >= self.best_loss:
  + before, self.best_loss = self.best_loss, val_loss
  +         if before is not None and val_loss >= before:
  tests/training/test_saver.py::test_the_best_checkpoint_stays_when_validation_worsens
train.py: A step that is left out does not count its samples, so a resume reads some of the data again.
  - self.samples += self.cfg.samples(self.step)
  + self.samples += self.cfg.samples(self.step) * bool(finite)
  tests/training/test_oracle.py::test_skipped_steps_equal_the_oracles
engine/resume.py: A resume restores the gradient scaler's scale, but not how many good steps it has counted.
  - load_state_dict(state["scaler"])
  + load_state_dict(scaler.state_dict() | {"scale": state["scaler"]["scale"]})
  tests/training/test_oracle.py::test_the_gradient_scaler_equals_the_oracles
sample.py: Sampling with top_p drops the token with which the sum first reaches p.
  - over = (before >= cfg.top_p * ordered.sum(-1, keepdim=True)) & (before > 0)
  + over = (before + ordered >= cfg.top_p * ordered.sum(-1, keepdim=True)) & (before > 0)
  tests/commands/test_sample.py::test_choose
engine/interchange/hf_config.py: Keys of a config.json that nothing reads are ignored, such as is_causal.
  - refuse_rest(keys, NEUTRAL | self.fixed)
  + pass
  tests/interchange/test_hf_import.py::test_each_key_counts_as_in_transformers[gpt2]
ops.py: A map over the context divides by the number of keys of the strip, not of those that the query sees.
  - phi(wide, attn_mask.sum(-1, keepdim=True, dtype=wide.dtype))
  + phi(wide, torch.tensor(k.size(-2)).to(wide.dtype))
  tests/model/test_naive.py
flags.py:LayerFlags.sums: All layers have the readers of the first string of --block.
  - layer % len(self.strings)
  + 0
  tests/model/test_pools.py::test_a_string_names_the_readers_of_each_sum
model.py:Experts.forward: The bias that balances the loads of experts also weighs their results.
  - = p.gather
  + = (p if self.balance is None else p + self.balance.bias).gather
  tests/model/test_experts.py::test_experts_are_those_of_transformers
engine/parallel/sharded.py: The loads of experts count in the gradient's norm, and so clip the gradient.
  - if p.grad is not None and p not in self.loads]
  + if p.grad is not None]
  tests/training/test_optim.py::test_loads_are_no_gradients
data/objective.py: Causal models learn the sources of pairs too.
  - targets = np.where(marks == TARGET, window.numpy(), -1)[:, 1:]
  + targets = np.where(marks < PADDING, window.numpy(), -1)[:, 1:]
  tests/data/test_pairs.py::test_an_epoch_has_every_pair_once_and_whole
data/objective.py: Micro-batches of pairs weigh alike, however many targets they have.
  -     equal_targets = False
  -
  +     equal_targets = True
  +
  tests/data/test_pairs.py::test_a_step_is_the_mean_over_all_its_targets
engine/parallel/sharded.py: The tied weight, which both ends of a pipeline have, is counted twice in the gradient norm.
  - (name not in self.counted_by_other_stage) / math.sqrt(copies)
  + 1 / math.sqrt(copies)
  tests/parallel/test_layouts.py::test_losses_do_not_depend_on_the_layout[pairs]
engine/parallel/initial.py: What __init__ writes into a layer of ours, such as nn.init.zeros_, is lost without a word.
  - if p._version > 0 and not drawn:
  + if p._version > 1 and not drawn:
  tests/model/test_initial.py::test_other_values_are_refused_by_name
model.py: The post-norm is a pre-norm.
  - "post": {"total"},
  + "post": {"before", "last"},
  tests/model/test_references.py::test_block_equals_torch
model.py:Model.initial_weight: The queries of shaped attention, which begin at zero, are drawn like all other weights.
  - value.zero
  + 0
  tests/model/test_model.py::test_initial_values_of_simplified_blocks
data/loader.py: A mixture that a resume has changed is read out of step with the samples of each source that it counts.
  - at = samples - self.since
  + at = samples
  tests/checkpoint/test_data.py::test_each_source_goes_on_where_the_weights_change
data/pairs.py: In a chat, the line of the assistant's role follows the user's message without a line end.
  - text += f"{content}\n"
  + text += content
  tests/data/test_pairs.py::test_a_chat_has_the_assistants_contents_as_targets
engine/evaluation.py: Rows that fill the last batch count as text, so bits per byte are too small.
  - total[2] += (token_bytes[targets.clamp(min=0)] * counted).sum(dtype=total.dtype)
  + total[2] += token_bytes[targets.clamp(min=0)].sum(dtype=total.dtype)
  tests/commands/test_evaluate.py::test_a_text_of_any_length_equals_a_loop_in_float64
model.py:Neighbours.forward: The earliest tap of a convolution reaches one token into the document before.
  - >= i
  + >= i - 1
  tests/model/test_naive.py
model.py: --rope_scaling is accepted beside positions that it has no effect on.
  - rope_scaling: str = ""  # [pos=rope] linear:F
  + rope_scaling: str = ""  # linear:F
  tests/model/test_ignored.py
engine/parallel/expert.py: Copies of experts exchange gradients in the order of a set, which processes do not share.
  -     return cut
  +     return [*{*cut}]
  tests/parallel/test_layouts.py::test_losses_do_not_depend_on_the_layout[meshes]
model.py:Attention.slots: Under qk_norm, the keys of slots beside a context have no norm.
  - self.k_norm(self.slot_k)
  + self.slot_k
model.py:Experts.__init__: Shared experts of e.relu2 have the map of --mlp.
  - ._replace(phi=reader.phi)
  +
model.py:MultiHeadAttention.make_slots: Without n_slot, s/2 has as many parameters as the whole MLP.
  - phi=phi, share=self.reader.share
  + phi=phi
model.py:Attention.__init__: Value embeddings are in the layers of every second string, not in every second layer.
  - layer % 2
  + layer % len(cfg.strings) % 2
flags.py:LayerFlags.has_even_c: Value embeddings are refused where only a string's second turn has a c in an even layer.
  - 2 * len
  + len
model.py: rope_scaling also acts in the layers L, which have rope_theta_local.
  - rotations.append((frequencies(n, cfg.rope_theta_local, t.device), 1.0))
  + rotations.append(scaled_frequencies(cfg, frequencies(n, cfg.rope_theta_local, t.device)))
model.py: All layers of an encoder have experts, whatever n_dense_layer says.
  - flags.n_layer = cfg.n_encoder_layer or cfg.n_layer
  + flags.n_layer = cfg.n_encoder_layer or cfg.n_layer
  +             flags.n_dense_layer = 0
  tests/model/test_naive.py::test_two_flags_together
ops.py:naive_attention: The softcap of scores covers ALiBi's bias.
  - .mT, cap) + bias
  + .mT + bias, cap)
  tests/model/test_naive.py::test_a_text_of_several_strips
train.py: After a resume, the first tokens_per_s counts all tokens since step 0.
  - self.ranks.device, self.step, self.samples * cfg.block_size)
  + self.ranks.device, self.step, 0)
engine/metrics.py: The duration of a run is that since its last logged step.
  - round(time.perf_counter() - self.started)
  + round(time.perf_counter() - self.since)
  tests/commands/test_transcripts.py::test_a_run_and_its_resume
evaluate.py: The perplexity is a power of 2 instead of e.
  - else math.exp(loss.nats)
  + else 2**loss.nats
sample.py: The tokens per second of several samples are those of one.
  - return n * len(samples)
  + return n
  tests/commands/test_transcripts.py
tools/lens.py: All columns of the lens's picture have the bars of the first one.
  - [getattr(unit, field) for unit in units]
  + [unit.share for unit in units]
  tests/tools/test_lens.py::test_the_bars_of_the_picture
train.py: The MFU is a share of the peak of one rank, so on n ranks it is n times too large.
  - peak and peak * ranks.size
  + peak
  tests/training/test_train.py::test_the_mfu_is_a_share_of_the_peak_of_all_ranks
engine/parallel/ranks.py: No rank on GPUs sets its device, so all of them allocate on the first one.
  - torch.cuda.set_device(device)
  + pass
  tests/training/test_train.py::test_a_rank_takes_the_gpu_of_its_number_on_its_node
engine/weights.py: evaluate.py --parallel=fsdp refuses weights that fit only on several ranks.
  - flags, ranks.size, ranks.device)
  + flags, 1, ranks.device)
engine/parallel/connection.py: Ranks of several machines are taken to share the memory of one.
  - os.environ.get("LOCAL_WORLD_SIZE", size)
  + os.environ.get("WORLD_SIZE", size)
  tests/plan/test_memory.py
engine/plan/plan.py: Groups of exactly eight GPUs are planned with the network instead of NVLink.
  - if ranks * distance <= PER_NODE:
  + if ranks * distance < PER_NODE:
  tests/plan/test_plan.py::test_bandwidth
engine/step.py: Spikes are compared with the first hundred norms of a run instead of the last.
  - [*last, norm][-self.LAST :]
  + [*last, norm][: self.LAST]
  tests/training/test_step.py::test_a_spike_is_above_the_median_of_the_last_hundred_norms
engine/config.py: --lr_decay_iters is accepted beside --schedule=constant, which does not read it.
  - lr_decay_iters: int = 0  # [schedule!=constant] step
  + lr_decay_iters: int = 0  # step
  tests/training/test_ignored.py
data/loader.py: On CUDA, a document whose number follows the one before it begins where that one does.
  - torch.searchsorted(x, first[name]) for
  + torch.searchsorted(x, first[name] - 2, right=True) for
  tests/model/test_flash.py::test_flash_equals_naive_attention
engine/parallel/fsdp.py: FSDP adds the gradients of its ranks in 16 bits.
  - reduce_dtype=torch.float32
  + reduce_dtype=ranks.dtype
  tests/plan/test_plan.py::test_two_ranks_send_what_is_planned
engine/config.py: --dp_replicate is accepted beside ddp, which does not read it.
  - dp_replicate: int = 1  # [>0] [parallel=fsdp]
  + dp_replicate: int = 1  # [>0]
engine/config.py: --span_length is accepted beside objectives without spans.
  - [objective=seq2seq] mean length
  + mean length
  tests/training/test_ignored.py::test_a_flag_in_effect_is_read_and_others_have_none
"""


class Fault(NamedTuple):
    file: str
    where: str  # the function or class, as Class.function, or "" for the file
    old: str
    new: str
    what: str
    tests: str

    def planted(self, text: str) -> str:
        """The text of the file with the fault."""
        lines = text.splitlines(keepends=True)
        place = ast.parse(text)
        begin, end = 0, len(text)
        for name in filter(None, self.where.split(".")):
            [place] = [node for node in place.body if getattr(node, "name", "") == name]
            begin = len("".join(lines[: place.lineno - 1]))
            end = len("".join(lines[: place.end_lineno]))
        part = text[begin:end]
        assert part.count(self.old) == 1, f"{self.file}:{self.where} holds {part.count(self.old)} times\n{self.old}"
        return text[:begin] + part.replace(self.old, self.new) + text[end:]


def parsed(text: str) -> Iterator[Fault]:
    for faults, tests in re.findall(r"(?s)(.+?\n)  (tests/[^\n]+)\n", text):
        for fault in re.split(r"(?<=\n)(?=\S)", faults):
            head = r"([^\s:]+):(?:(\S+):)? (.+)\n((?:  -.*\n)+)((?:  \+.*\n)+)"
            file, where, what, *code = re.fullmatch(head, fault).groups()
            old, new = (re.sub("(?m)^  [-+] ?", "", lines).removesuffix("\n") for lines in code)
            yield Fault(file, where or "", old, new, what, tests)


FAULTS = [*parsed(TEXT[1:])]
