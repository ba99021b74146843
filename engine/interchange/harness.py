"""The interface of EleutherAI's lm-eval on our models: its tasks with our tokenizer and our cached decoding.

    lm_eval.simple_evaluate(model=Harness(model, tokenizer, batch_size=16, device=device), tasks=["piqa"])

The figures are those of lm-eval's own `hf` model on the exported folder: it also begins a text with the tokenizer's
prefix (Llama's <s>), scores an empty context after end-of-text, and cuts what is too long from the left. Two things
differ: the text of a special token is ordinary text here, and end-of-text also stands for the empty contexts at which
`hf` fails. It runs in one process, and decodes greedily. For 16-bit matrix products, put the call under torch.autocast.
The module needs lm-eval: pip install -e .[eval].
"""

from collections import defaultdict

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import chunks, handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from data.base_tokenizer import Tokenizer
from data.errors import require
from engine.decode import generate
from model import Model


class Harness(TemplateLM):
    """An LM of lm-eval. `batch_size` texts are computed at once."""

    eot_token_id = prefix_token_id = 0  # properties of TemplateLM; each object has its own values

    def __init__(self, model: Model, tokenizer: Tokenizer, batch_size: int, device: torch.device | str):
        super().__init__()
        fact = f"objective={model.cfg.objective} cannot run tasks"
        require(model.cfg.objective == "causal", f"{fact}; use a causal model")
        fact = f"tokenizer {tokenizer.spec['kind']} has no end-of-text, with which tasks begin"
        require(tokenizer.eot is not None, f"{fact}; use another")
        self.ours, self.vocabulary, self.batch_size = model, tokenizer, batch_size
        self.limit, self._device = model.cfg.block_size, torch.device(device)
        self.eot_token_id = tokenizer.eot
        # The token before a text of which every token is scored
        self.prefix_token_id = tokenizer.eot if tokenizer.bos is None else tokenizer.bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
        prefix = [] if add_special_tokens is False else self.vocabulary.prefix
        return [*prefix, *self.vocabulary.encode(string).tolist()]

    @torch.inference_mode()
    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, **kwargs) -> list[tuple[float, bool]]:
        """(log-probability, whether it is greedy) of the continuation of each (texts, context, continuation)."""
        rows = defaultdict(list)  # inputs -> requests; choices of one token each share their inputs
        for i, (_, context, continuation) in enumerate(requests):
            fact = f"a continuation of {len(continuation)} tokens does not fit in block_size={self.limit}"
            require(len(continuation) <= self.limit, f"{fact}; leave it out")
            context = context or [self.prefix_token_id]  # lm-eval moves white space at its end into the continuation
            rows[tuple((context + continuation)[-self.limit - 1 : -1])].append((i, continuation))
        results = [(0.0, True)] * len(requests)
        batches = list(chunks(sorted(rows, key=len, reverse=True), self.batch_size))
        for batch in tqdm(batches, desc="score", disable=disable_tqdm):
            texts = [torch.tensor(inputs, dtype=torch.int64) for inputs in batch]
            idx = pad_sequence(texts, batch_first=True)  # causal: no text sees what is behind it
            for x, inputs in zip(self.ours.hidden(idx.to(self.device)), batch, strict=True):
                longest = max(len(continuation) for _, continuation in rows[inputs])
                scores = self.ours.logits(x[len(inputs) - longest : len(inputs)]).log_softmax(dim=-1)  # (n, V)
                for i, continuation in rows[inputs]:
                    targets = torch.tensor(continuation, device=self.device)
                    own = scores[longest - len(continuation) :]
                    greedy = bool((own.argmax(dim=-1) == targets).all())
                    results[i] = (float(own.gather(1, targets[:, None]).sum()), greedy)
        for (texts, _, _), result in zip(requests, results, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, result)
        return results

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """The log-probability of every token of each text, in windows of block_size that score each token once."""
        windows, owners, totals = [], [], [0.0] * len(requests)
        for i, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            found = get_rolling_token_windows(ids, self.prefix_token_id, max_seq_len=self.limit, context_len=1)
            windows += [(None, *make_disjoint_window(each)) for each in found]
            owners += [i] * (len(windows) - len(owners))
        for i, (score, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[i] += score
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """The greedy continuation of each context, up to the first text in `until`, end-of-text or max_gen_toks."""
        results, groups = [""] * len(requests), defaultdict(list)  # contexts of one length need no padding
        eot = self.vocabulary.token_bytes[self.eot_token_id].decode()
        for i, request in enumerate(requests):
            options = normalize_gen_kwargs(request.args[1])
            require(not options["do_sample"], "a task with do_sample=True needs sampling; set do_sample to False in it")
            most, until = options["max_gen_toks"], tuple(handle_stop_sequences(options["until"], eos=eot))
            fact = f"max_gen_toks={most} leaves no room for a context in block_size={self.limit}"
            require(most < self.limit, f"{fact}; lower it, as in --gen_kwargs or the task's generation_kwargs")
            context = (self.tok_encode(request.args[0]) or [self.prefix_token_id])[most - self.limit :]
            groups[len(context), until, most].append((i, context))
        longest_first = sorted(groups.items(), reverse=True)
        for (_, until, most), group in tqdm(longest_first, desc="generate", disable=disable_tqdm):
            for batch in chunks(group, self.batch_size):
                numbers, contexts = zip(*batch, strict=True)
                for i, text in zip(numbers, self.generate(contexts, until, most), strict=True):
                    results[i] = text
                    self.cache_hook.add_partial("generate_until", requests[i].args, text)
        return results

    def generate(self, contexts: tuple[list[int], ...], until: tuple[str, ...], most: int) -> list[str]:
        """The continuations of contexts with the same length, by at most `most` tokens."""
        eot, V, ids = self.eot_token_id, self.vocabulary.vocab_size, [[] for _ in contexts]
        done = [False] * len(contexts)
        choose = lambda logits: logits[:, :V].argmax(dim=-1)  # noqa: E731
        for new in generate(self.ours, torch.tensor(contexts, device=self.device), most, choose):
            for row, token in enumerate(new.tolist()):
                if not done[row]:
                    ids[row].append(token)
                    done[row] = token == eot or any(stop in self.vocabulary.decode(ids[row]) for stop in until if stop)
            if all(done):
                break
        texts = [self.vocabulary.decode([i for i in row if i != eot]) for row in ids]
        return [postprocess_generated_text(text, list(until), None) for text in texts]
