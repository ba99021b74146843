"""superblock's causal models for transformers: AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).

model.py, ops.py and flags.py, beside this file, are the model; config.json holds its flags. A batch may be padded on
either side (only after the texts if slots have a position), and `generate` works with transformers' caches.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.configuration_utils import PretrainedConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

from .model import LearnedEmbedding, Model, ModelConfig, MultiHeadAttention, Neighbours


class SuperblockConfig(PretrainedConfig):
    """The flags of ModelConfig, in `flags`, and the names that transformers' tools look for."""

    model_type = "superblock"

    def __init__(self, flags: dict | None = None, **kwargs):
        self.flags = flags or {}
        cfg = ModelConfig(**self.flags)
        self.vocab_size = cfg.vocab_size
        self.hidden_size = cfg.n_embd
        self.max_position_embeddings = cfg.block_size
        self.num_hidden_layers = cfg.n_layer
        self.num_attention_heads = cfg.n_head
        kwargs["tie_word_embeddings"] = cfg.tie_weights
        super().__init__(**kwargs)


def extend_rows(update: Callable, n: int, x: Tensor) -> Tensor:
    """As engine.decode.RowCache.extend. A cache of transformers, which can be cropped, keeps all rows, as keys."""
    T = x.size(-2)
    keys = x.reshape(len(x), -1, *x.shape[-2:])
    keys, _ = update(keys, keys[..., :0])
    rows = keys[..., -n - T :, :].view(*x.shape[:-2], -1, x.size(-1))
    return F.pad(rows, (0, 0, n + T - rows.size(-2), 0))


class SuperblockForCausalLM(PreTrainedModel, GenerationMixin):
    """A Model as transformers expects it."""

    config_class = SuperblockConfig
    base_model_prefix = "model"
    _input_embed_layer = "wte"  # of `model`
    _tied_weights_keys = {"model.head.weight": "model.wte.weight"}

    def __init__(self, config: SuperblockConfig):
        super().__init__(config)
        self.seed = int(torch.randint(2**62, (), device="cpu"))
        self.model = Model(ModelConfig(**config.flags), self.seed)
        self.model.cfg.doc_positions = True  # the documents are padding and a text
        self.cached = [m for m in self.model.modules() if isinstance(m, MultiHeadAttention) and m.causal]
        self.cached += [m for m in self.model.modules() if isinstance(m, Neighbours)]
        config.num_hidden_layers = len(self.cached)  # of transformers' caches; a layer may have several
        self.names = {m: name for name, m in self.model.named_modules()}
        self.post_init()

    def get_output_embeddings(self):
        return self.model.head

    @torch.no_grad()
    def _init_weights(self, module):
        """Draws the parameters of this module that no file has given."""
        for kind, p in module.named_parameters(recurse=False):
            if not getattr(p, "_is_hf_initialized", False):
                name = f"{self.names[module]}.{kind}"
                p.copy_(self.model.initial_weight(name, self.seed, p.shape, (0,) * p.dim(), p.shape, p.device))

    def texts_of(self, attention_mask: Tensor | None) -> Tensor | None:
        """attention_mask (B, S) -> the documents (B, S) of each row, padding and the text, or None if no padding comes
        before a text. ValueError for zeros inside of a text."""
        if attention_mask is None:
            return None
        if attention_mask.dim() != 2:
            raise ValueError(f"attention_mask has {attention_mask.dim()} dimensions; give one of (B, S), 0 for padding")
        if attention_mask.all():
            return None
        text = attention_mask.cumsum(dim=1) > 0
        ahead = attention_mask.flip(1).cumsum(dim=1).flip(1) > 0
        if (text & ahead & (attention_mask == 0)).any():
            raise ValueError("attention_mask has zeros inside of a text; pad before the texts, or leave tokens out")
        if text[:, 0].all():
            return None
        if self.model.cfg.placed_slots:
            where = "away from the slots of pos=rope with joint_slots"
            raise ValueError(f"padding before a text moves it, {where}; pad after it, or give texts one by one")
        return text.long()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, past_key_values=None,
        labels: Tensor | None = None, logits_to_keep: int | Tensor = 0, cache=None, **kwargs,
    ) -> CausalLMOutputWithPast:  # fmt: skip
        """input_ids (B, T) -> logits (B, T, V). attention_mask (B, past + T) is 0 where there is padding. The cache is
        called past_key_values before transformers 5.24."""
        model, T = self.model, input_ids.size(1)
        if cache is None:
            cache = past_key_values
        if kwargs.get("position_ids") is not None:
            raise ValueError("position_ids are not read; leave them out, and give attention_mask for padding")
        if cache is None and kwargs.get("use_cache"):
            cache = DynamicCache()
        start = 0
        if cache is not None:
            if getattr(cache, "is_compileable", False):
                raise ValueError("this model's cache grows with the text; leave out cache_implementation=static")
            start = cache.get_seq_length()
        if start + T > model.cfg.block_size and isinstance(model.pos, LearnedEmbedding):
            raise ValueError(f"a text of {start + T} tokens does not fit in block_size={model.cfg.block_size}; crop it")
        docs = texts = self.texts_of(attention_mask)
        if texts is not None:
            docs = texts[:, start:].contiguous(), texts
        for layer, m in enumerate(self.cached):
            m.cache = None
            if cache is not None:
                extend = partial(cache.update, layer_idx=layer)
                if isinstance(m, Neighbours):
                    extend = partial(extend_rows, extend, m.reach)
                m.cache = SimpleNamespace(extend=extend)
        x = model.hidden(input_ids, start, docs)
        keep = logits_to_keep
        if isinstance(keep, int):
            keep = slice(-keep, None)
        logits = model.logits(x[:, keep])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=model.cfg.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss, logits, cache)
