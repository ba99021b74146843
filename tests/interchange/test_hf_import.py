"""hf: reads config.json as transformers does: after each edit, the logits are the same, or the file is refused."""

import json

import pytest
import torch
import transformers  # whose classes are loaded when they are asked for

from engine.interchange.hf_config import NEUTRAL, UNREAD
from engine.interchange.huggingface import read_hf
from tests.interchange.test_families import ARCHITECTURES, build, ours, tokens

ABSENT = object()
WINDOW = dict(sliding_window=5, use_sliding_window=True, max_window_layers=1)
SCALED = dict(rope_type="yarn", rope_theta=50.0, factor=4.0, beta_fast=1.5, beta_slow=0.5)
LLAMA3 = dict(rope_type="llama3", rope_theta=50.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)
OLDER = dict(rope_parameters=ABSENT, rope_theta=30.0)
OLDER_NAME = dict(rope_scaling={"type": "linear", "factor": 3.0})
# Keys that files of these families hold, or that are another family's
MORE = """
    rope_theta rope_scaling rope_local_base_freq rotary_pct rotary_emb_base partial_rotary_factor head_dim is_causal
    original_max_position_embeddings sliding_window sliding_window_pattern layer_types n_embed num_attention_heads
    num_hidden_layers hidden_size num_key_value_heads quantization_config per_layer_config attention_bias mlp_bias
    hidden_act intermediate_size attention_chunk_size alibi multi_query n_head n_layer transformers_weights
""".split()
ROPE = ("llama", "mistral", "qwen", "gemma2")
EDITS = {  # keys to change at once, the beginnings of the names of models, whether both read it
    "yarn, original context": (dict(rope_parameters=SCALED | dict(original_max_position_embeddings=12)), ROPE, True),
    "yarn, original context beside": (dict(rope_parameters=SCALED, original_max_position_embeddings=6), ROPE, False),
    "yarn, no original context": (dict(rope_parameters=SCALED), ROPE, True),
    "llama3, no original context": (dict(rope_parameters=LLAMA3), ROPE, True),
    "no layer_types": (WINDOW | dict(layer_types=ABSENT), ("qwen2", "qwen3"), True),
    "a window that is off": (WINDOW | dict(layer_types=ABSENT, use_sliding_window=False), ("qwen2", "qwen3"), True),
    "no window": (dict(sliding_window=None), ("mistral", "mixtral"), True),
    "a pattern": (dict(layer_types=ABSENT, sliding_window_pattern=3), ("gemma3",), True),
    "a pattern of Gemma 2": (dict(layer_types=ABSENT, sliding_window_pattern=3), ("gemma2",), True),
    "flat RoPE": (dict(rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=30.0)), ("gemma3",), False),
    "RoPE of one kind": (dict(rope_parameters=dict(full_attention=SCALED)), ("gemma3",), True),
    "older RoPE": (OLDER, ("gemma", "llama", "qwen"), True),
    "older RoPE of two kinds": (OLDER | dict(rope_local_base_freq=9.0), ("gemma3",), True),
    "older scaling": (dict(rope_scaling={"rope_type": "linear", "factor": 3.0}), (*ROPE, "gemma3"), True),
    "older scaling of the older name": (OLDER_NAME, ROPE, True),
    "older scaling that transformers ignores": (OLDER_NAME, ("gemma3",), False),
    "two names": (dict(num_attention_heads=4), ("gpt2",), False),
    "a division by 0": (dict(final_logit_softcapping=0.0), ("gemma",), False),
    "another division by 0": (dict(attn_logit_softcapping=0.0), ("gemma2",), False),
}  # fmt: skip
SKIPPED = ("llama 3",)  # and variants behind a comma, so that each family has one model
NAMES = [name for name in ARCHITECTURES if "," not in name and name not in SKIPPED]
HARMLESS = {key: 0.5 if "drop" in key else 7 for key in UNREAD - {"model_type"}} | dict(  # where types matter:
    architectures=["Other"], auto_map={"AutoConfig": "code.Config"}, cache_implementation="hybrid", dtype="float32",
    id2label={"0": "a"}, initializer_range=0.5, is_decoder=True, label2id={"a": 0}, output_attentions=False,
    output_hidden_states=True, output_router_logits=False, router_aux_loss_coef=0.5, router_jitter_noise=0.5,
    problem_type="regression", reorder_and_upcast_attn=True, return_dict=True, summary_activation="gelu",
    summary_proj_to_labels=False, summary_type="mean", summary_use_proj=False, tokenizer_class="Other",
    torch_dtype="bfloat16", transformers_version="1", use_cache=False,
)  # fmt: skip


def others(value):
    match value:
        case None:
            return [True, False, 2, {"rope_type": "linear", "factor": 2.0}]
        case bool():
            return [not value, ABSENT]
        case int():
            return [value + 1, ABSENT]
        case float():
            return [2 * value + 0.5, ABSENT]
        case str():
            return ["gelu", ABSENT]
        case list():
            return [value[::-1], ABSENT]
    changed = [value | {name: new} for name, old in value.items() if name not in UNREAD for new in others(old)[:1]]
    return [*changed, *(value | {name: 2.0} for name in ("factor", "mscale", "partial_rotary_factor")), ABSENT]


class Folder:
    """A folder of transformers' with a small model, and what both sides make of it after an edit of config.json.
    `asked` has the public attributes of its config that transformers asks for, and the other names of these."""

    def __init__(self, name: str, where):
        self.where = where
        base = transformers.PreTrainedConfig
        asked = set()
        get = base.__getattribute__
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(base, "__getattribute__", lambda self, key: asked.add(key) or get(self, key))
            reference = build(name)
            reference(tokens())
        kind = type(reference.config)
        methods = set(dir(kind)) - set(kind.__dataclass_fields__)
        self.asked = {each for each in asked - methods if not each.startswith("_")} | kind.attribute_map.keys()
        reference.save_pretrained(where)
        self.config = json.loads((where / "config.json").read_text())
        self.weights = reference.state_dict()

    def theirs(self) -> torch.Tensor | None:
        try:
            config = transformers.AutoConfig.from_pretrained(self.where)
            model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
            model.load_state_dict(self.weights)
            return model(tokens()).logits
        except Exception:  # of whatever kind: the values are ones that nobody writes
            return None

    @torch.no_grad()
    def compare(self, **changes) -> bool:
        """Whether both accept the file; the logits must then be the same. Our refusal must be one line."""
        config = {name: x for name, x in (self.config | changes).items() if x is not ABSENT}
        (self.where / "config.json").write_text(json.dumps(config))
        try:
            model = ours(read_hf(self.where))
        except ValueError as error:
            assert "\n" not in str(error)
            assert len(str(error)) < 500
            return False
        if (expected := self.theirs()) is None:
            return False
        difference = (model(tokens()) - expected).abs().max()
        same = difference < 4e-5 * expected.abs().max()  # ten times what float32 makes of it, which is 3.3e-6
        assert same and expected.std() > 0.1, f"{changes} changes theirs alone"
        return True


EIGHTHS = [pytest.param(name, 8, id=name) for name in NAMES]
ALL = [pytest.param(name, 1, id=f"{name}, all", marks=pytest.mark.slow) for name in NAMES]


@pytest.mark.parametrize("name, step", EIGHTHS + ALL)
def test_each_key_counts_as_in_transformers(tmp_path, name, step):
    """Of the edits of one key, a family makes an eighth, each one another; make slow makes all of them."""
    folder = Folder(name, tmp_path)
    names = (folder.asked | folder.config.keys() | {*MORE, *NEUTRAL}) - UNREAD
    assert len(names) > 40
    assert "is_causal" in names
    edits = [{key: value} for key in sorted(names) for value in others(folder.config.get(key))]
    assert sum(folder.compare(**edit) for edit in edits[NAMES.index(name) % step :: step]) >= 9 // step
    for what, (changes, _, equal) in [(what, edit) for what, edit in EDITS.items() if name.startswith(edit[1])]:
        assert folder.compare(**changes) == equal, what
    changes = {key: value for key, value in NEUTRAL.items() if key not in folder.config}
    assert folder.compare(**changes, **HARMLESS)


def test_a_window_of_no_tokens_is_refused(tmp_path):
    """transformers takes null alone for no window."""
    folder = Folder("mistral", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(folder.config | {"sliding_window": 0}))
    with pytest.raises(ValueError, match="sliding_window=0, but only null or more than 0"):
        read_hf(tmp_path)
