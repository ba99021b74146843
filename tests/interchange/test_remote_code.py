"""model.py as a custom architecture of transformers: the same logits, `generate`, padding, caches, another save."""

import json

import pytest
import torch
import transformers  # whose classes are loaded when they are asked for

from engine.decode import generate
from model import Model, ModelConfig
from tests.interchange.test_families import loaded, write
from tests.models import jitter

SIZE = dict(n_layer=2, n_head=4, n_embd=32, block_size=24, vocab_size=50)
KINDS = {
    "gpt2": dict(bias=True),
    "llama": dict(pos="rope", norm="rmsnorm", mlp="swiglu", attention="gqa", n_kv_head=2, tie_weights=False),
    "superblock": dict(block="superblock", pos="alibi", window=5, window_pattern="SL"),
    "parts": dict(block="c/2+p/2,c.gelu/2+p;c,s", pos="rope", n_slot=3),
    "joint pool": dict(block="c.joint_slots", pos="rope", n_slot=3),
    "simplified": dict(block="simplified", pos="rope", sas_value_proj="all"),
    "gemma": dict(pos="rope", pos_pattern="LLG", rope_scaling="llama3:8", norm="rmsnorm", norm_placement="after")
    | dict(norm_eps=1e-6, mlp="geglu_tanh", head_dim=16, qkv_bias=True, qk_norm=True, embed_scale=3.0),
    "capped": dict(block="parallel", pos="sinusoidal", attn_softcap=5.0, logit_softcap=3.0),
    "convolution": dict(window=5, conv=4, value_embedding=True),
}


pytestmark = pytest.mark.usefixtures("modules_cache")


@pytest.fixture(scope="session")
def both(tmp_path_factory, modules_cache):
    """both(kind): our model, and the one that transformers loads from what was written."""
    made = {}

    def make(kind: str):
        if kind not in made:
            model = Model(ModelConfig(**SIZE | KINDS[kind]), seed=1).eval()
            torch.manual_seed(1)
            jitter(model, 0.3)  # no initial zeros or ones
            folder = tmp_path_factory.mktemp(kind) / "written"
            write(folder, model, remote_code=True)
            theirs = loaded(folder, trust_remote_code=True)
            made[kind] = model.double(), theirs.double(), folder  # in which no CPU rounds by more than 1e-12
        return made[kind]

    return make


def greedy(model: Model, prompt: torch.Tensor, n: int) -> list[list[int]]:
    return torch.stack([*generate(model, prompt, n, lambda logits: logits.argmax(-1))], dim=1).tolist()


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(50, shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_loss_and_greedy_text(both, kind):
    ours, theirs, _ = both(kind)
    idx = tokens(3, 20)
    targets = torch.cat((idx[:, 1:], torch.full((3, 1), 0)), dim=1)
    with torch.no_grad():
        found = theirs(idx, labels=idx.where(idx % 7 > 0, -100))
        torch.testing.assert_close(found.logits, ours(idx), atol=1e-9, rtol=0)
        expected = ours(idx, targets.where(targets % 7 > 0, -1))
        torch.testing.assert_close(found.loss.double(), expected, atol=0, rtol=1e-5)  # transformers' is in float32
    assert not theirs.training
    assert theirs.num_parameters() == ours.n_params()
    idx = idx[:, :5]
    for use_cache in (True, False):
        found = theirs.generate(idx, max_new_tokens=6, do_sample=False, use_cache=use_cache)
        assert found[:, 5:].tolist() == greedy(ours, idx, 6)  # further than the window


@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_nothing(both, kind):
    """Before a text, it is refused where a token's place counts."""
    ours, theirs, _ = both(kind)
    short = tokens(1, 4)
    long = tokens(1, 9)
    for side in (1, 0):  # before the text, after it
        rows = [torch.zeros(1, 5, dtype=torch.long), short]
        idx = torch.cat((torch.cat(rows if side else rows[::-1], dim=1), long))
        mask = torch.ones_like(idx)
        mask[0, slice(0, 5) if side else slice(4, 9)] = 0
        if side and kind == "joint pool":
            with pytest.raises(ValueError, match="^padding before a text moves it, .* joint_slots; pad after it"):
                theirs(idx, attention_mask=mask)
            continue
        with torch.no_grad():
            found = theirs(idx, attention_mask=mask).logits
        torch.testing.assert_close(found[0, mask[0] > 0], ours(short)[0], atol=1e-9, rtol=0)
        torch.testing.assert_close(found[1], ours(long)[0], atol=1e-9, rtol=0)
        if side:
            found = theirs.generate(idx, attention_mask=mask, max_new_tokens=3, do_sample=False)
            assert found[:, 9:].tolist() == greedy(ours, short, 3) + greedy(ours, long, 3)


@torch.no_grad()
def test_use_cache_begins_a_cache(both):
    """As in transformers' own classes: the next call goes on with the text, as if it were read at once."""
    ours, theirs, _ = both("llama")
    idx = tokens(2, 9)
    first = theirs(idx[:, :5], use_cache=True)
    rest = theirs(idx[:, 5:], past_key_values=first.past_key_values, use_cache=True).logits
    torch.testing.assert_close(torch.cat((first.logits, rest), dim=1), ours(idx), atol=1e-9, rtol=0)
    assert theirs(idx, use_cache=False).past_key_values is None


def test_what_the_forward_cannot_compute_is_refused(both):
    """transformers' own classes leave out tokens inside of a text, and have caches of a fixed size."""
    _, theirs, _ = both("llama")
    idx = tokens(2, 9)
    mask = torch.ones(2, 9, dtype=torch.long)
    inside = mask.clone()
    after = mask.clone()
    inside[1, 5] = 0
    after[0, 6:] = 0
    go_on = dict(max_new_tokens=2, do_sample=False)
    hole = "^attention_mask has zeros inside of a text; "
    for call, words in (
        (lambda: theirs(idx, attention_mask=inside), hole),
        (lambda: theirs.generate(idx, attention_mask=after, **go_on), hole),  # once the text goes on
        (lambda: theirs(idx, attention_mask=mask[:, None, None]), "^attention_mask has 4 dimensions; "),
        (lambda: theirs(idx, position_ids=torch.arange(9)[None]), "^position_ids are not read; "),
        (lambda: theirs.generate(idx, cache_implementation="static", **go_on), "^this model's cache grows with the "),
        (lambda: both("gpt2")[1].generate(tokens(1, 24), **go_on), "a text of 25 tokens does not fit in block_size=24"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_saved_again_and_drawn_anew(both, tmp_path):
    ours, theirs, _ = both("superblock")
    theirs.save_pretrained(tmp_path)
    assert {"model.py", "modeling_superblock.py", "model.safetensors"} <= {p.name for p in tmp_path.iterdir()}
    again = loaded(tmp_path, trust_remote_code=True)
    for (name, p), q in zip(ours.named_parameters(), again.model.parameters(), strict=True):
        assert torch.equal(p, q), name
    with torch.no_grad():
        torch.testing.assert_close(again(tokens(1, 9)).logits, theirs(tokens(1, 9)).logits)  # memory lies elsewhere
    config = transformers.AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
    model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=True).model
    assert 0.018 < model.blocks[0].sums[0].attn.qkv.weight.std() < 0.022
    assert model.head.weight is model.wte.weight
    assert (model.norm.weight == 1).all()
    assert config.flags == json.loads((tmp_path / "config.json").read_text())["flags"]
    assert (config.vocab_size, config.max_position_embeddings, config.tie_word_embeddings) == (50, 24, True)


@pytest.mark.parametrize("remote_code", [False, True])
@pytest.mark.parametrize("objective", ["masked", "seq2seq"])
def test_only_causal_models_are_written(tmp_path, objective, remote_code):
    with pytest.raises(ValueError, match=f"objective={objective} cannot be exported"):
        write(tmp_path / "x", Model(ModelConfig(**SIZE, objective=objective)), remote_code=remote_code)
    assert not [*(tmp_path / "x").iterdir()]
