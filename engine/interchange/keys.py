"""Reads the keys of a config.json of Hugging Face's, in their types, and refuses a file with keys that nothing reads.

keys = Keys(config, {"rope_theta": 10000.0})    # the values of keys that the file may leave out
theta = keys("rope_theta", float)               # ValueError names a value of another type
keys.finish()                                   # ValueError names the keys that no one has asked for
"""

import math
import reprlib
from types import NoneType
from typing import Any

from data.errors import require

HARMLESS = {  # why keys say nothing about the logits, whatever their values -> the keys
    "they name the file, its maker, or the program that wrote it": """
        _commit_hash _name_or_path architectures auto_map custom_pipelines is_llama_config model_type name_or_path
        tokenizer_class tokenizer_name transformers.js_config transformers_version unsloth_fixed unsloth_version""",
    "they say how transformers computes, in which dtype, and what it returns beside the logits": """
        _attn_implementation _attn_implementation_autoset attention_softmax_in_fp32 attn_impl attn_implementation
        bias_dropout_fusion cache_implementation chunk_size_feed_forward dtype gradient_checkpointing init_device
        masked_softmax_fusion output_attentions output_hidden_states pretraining_tp reorder_and_upcast_attn return_dict
        tie_last_hidden_states torch_dtype torchscript use_bfloat16 use_cache verbose""",
    "they are of training: dropout and initial weights": """
        attention_dropout attention_probs_dropout_prob attn_pdrop embd_pdrop emb_pdrop embedding_fraction
        hidden_dropout hidden_dropout_prob init_config initializer_range resid_pdrop""",
    "they are of other tasks: classification, summaries, encoders": """
        classifier_dropout finetuning_task id2label is_decoder label2id n_special num_labels predict_special_tokens
        problem_type summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
        task_specific_params tie_encoder_decoder""",
    "they say how text becomes ids and how more text is drawn": """
        bad_words_ids begin_suppress_tokens bos_token_id decoder_start_token_id diversity_penalty do_sample
        early_stopping encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty forced_bos_token_id
        forced_eos_token_id length_penalty max_length max_sequence_length min_length no_repeat_ngram_size
        num_beam_groups num_beams num_return_sequences output_scores pad_token_id prefix remove_invalid_values
        repetition_penalty return_dict_in_generate sep_token_id suppress_tokens temperature top_k top_p typical_p
        unk_token_id""",
    "transformers ignores them: older releases and other programs wrote them": """
        _sliding_window_pattern learned_pos_emb n_ctx norm_type offset_alibi skip_bias_add""",
}
UNREAD = {name for names in HARMLESS.values() for name in names.split()}
# Further keys that nothing has to read while they have these values. Of keys that are absent here, this value is null.
NEUTRAL = dict(
    apply_residual_connection_post_layernorm=False, attention_bias=False, attn_uses_sequence_id=False, ff_factor=4,
    full_attn_mod=1, interpolate_factor=1, is_causal=True, is_encoder_decoder=False, lm_head_bias=False,
    mlp_bias=False, partial_rotary_factor=1, pruned_heads={}, rope_interleaved=False, skip_bias_add_qkv=False,
    slow_but_exact=False, use_mrope=False,
)  # fmt: skip


def describe(value: Any) -> str:
    """A short text for an untrusted value, safe to print."""
    return " ".join(ascii(reprlib.repr(value))[1:-1].split())[:80] if type(value) is not str else ascii(value[:80])


def express(condition: object, fact: str):
    """ValueError unless the condition holds; the fact is a key, its value and the values that our flags express."""
    require(condition, f"{fact} can be expressed by our flags; choose another model")


class Keys:
    """Reads keys of a config.json in their types. A key that the file leaves out has the family's default."""

    def __init__(self, config: dict, defaults: dict):
        self.config, self.defaults = config, defaults
        self.seen: set[str] = set()

    def __call__(self, name: str, *kinds: type, least: int = 1) -> Any:
        """The value of the key. Whole numbers are from `least` on."""
        self.seen.add(name)
        value = self.config.get(name, self.defaults.get(name))
        if type(value) is int and float in kinds and abs(value) < 2**53:
            value = float(value)
        good = type(value) in kinds and (type(value) is not float or math.isfinite(value))
        good = good and (type(value) is not int or least <= value < 2**31)
        wanted = " or ".join("null" if kind is NoneType else kind.__name__ for kind in kinds)
        require(good, f"{name}={describe(value)} must be of type {wanted} and in range; correct it")
        return value

    def finish(self):
        """ValueError names the keys that nobody has read, unless they are known to say nothing about the logits."""
        rest = sorted(self.config.keys() - self.seen - UNREAD)
        rest = [name for name in rest if self.config[name] != NEUTRAL.get(name)]
        some = ", ".join(f"{ascii(name[:80])}={describe(self.config[name])}" for name in rest[:2])
        more = f" and {len(rest) - 2} more" if len(rest) > 2 else ""
        remedy = "delete keys that change nothing in this model, or choose another model"
        require(not rest, f"nothing here reads {some}{more}; {remedy}")
