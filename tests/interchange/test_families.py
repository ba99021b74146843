"""Hugging Face's models in and out, compared with transformers: logits, greedy text, every number of the weights."""

import json
import math
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers  # whose classes are loaded when they are asked for
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file

from data.tokenizer import ByteTokenizer, HFTokenizer, from_spec, train_bpe
from engine.decode import generate
from engine.interchange import __main__ as commands
from engine.interchange.families import FAMILIES, choose
from engine.interchange.huggingface import Pretrained, read_hf, shapes_of, write_hf, write_json
from engine.interchange.tokenizer import export_tokenizer
from engine.weights import load_model
from model import Model, ModelConfig
from tests.data.preparing import tokens_of
from tests.helpers import IN_FLOAT64, distance, losses, metrics, refused, weights_in
from tests.models import jitter

transformers.utils.logging.disable_progress_bar()
L = 3
H = 6
HKV = 2
C = 48
T = 24
V = 29  # names as in model.py
WINDOW = 5
SIZES = dict(pad_token_id=None, bos_token_id=None, eos_token_id=None, vocab_size=V)
LONG = SIZES | dict(num_hidden_layers=L, num_attention_heads=H, hidden_size=C, max_position_embeddings=T)
GATED = LONG | dict(num_key_value_heads=HKV, intermediate_size=80)
GEMMA = GATED | dict(head_dim=12, query_pre_attn_scalar=7, sliding_window=WINDOW)


def rope(kind: str = "default", theta: float = 50.0, **more) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta} | more}


LLAMA3 = rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=12)
BOTH = dict(full_attention=rope("linear", factor=2.0), sliding_attention=rope(theta=20.0))
BOTH = {kind: each["rope_parameters"] for kind, each in BOTH.items()}
TIED = dict(tie_word_embeddings=True)
GPT2 = SIZES | dict(n_layer=L, n_head=H, n_embd=C, n_positions=T)
WIDE = GATED | dict(hidden_size=64, num_attention_heads=4)
EXPERTS_OF_QWEN = dict(num_experts=5, num_experts_per_tok=3, moe_intermediate_size=24, norm_topk_prob=True, head_dim=12)
ARCHITECTURES = {  # name -> (class of its config, its keys)
    "gpt2": ("GPT2Config", GPT2),
    "gpt2, untied": ("GPT2Config", GPT2 | dict(n_inner=50, tie_word_embeddings=False)),
    "llama": ("LlamaConfig", GATED),
    "llama 3": ("LlamaConfig", GATED | LLAMA3),
    "llama, yarn": ("LlamaConfig", GATED | rope("yarn", factor=4.0, original_max_position_embeddings=6)),
    "llama, linear": ("LlamaConfig", GATED | rope("linear", factor=4.0) | dict(hidden_act="gelu")),
    "llama, biases": ("LlamaConfig", GATED | dict(attention_bias=True, mlp_bias=True, head_dim=10) | TIED),
    "llama, units": ("LlamaConfig", WIDE | dict(intermediate_size=192)),
    "mistral": ("MistralConfig", GATED | rope() | dict(sliding_window=WINDOW)),
    "qwen2": ("Qwen2Config", GATED | dict(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)),
    "qwen3": ("Qwen3Config", GATED | dict(head_dim=12) | TIED),
    "mixtral": ("MixtralConfig", GATED | rope() | dict(num_local_experts=3, sliding_window=WINDOW)),
    "mixtral, units": ("MixtralConfig", WIDE | dict(intermediate_size=128, num_local_experts=4)),
    "qwen with experts": ("Qwen3MoeConfig", GATED | rope() | EXPERTS_OF_QWEN),
    "gemma2": ("Gemma2Config", GEMMA | dict(final_logit_softcapping=3.0, attn_logit_softcapping=2.0)),
    "gemma3": ("Gemma3TextConfig", GEMMA | dict(sliding_window_pattern=2, rope_parameters=BOTH)),
}
FOLDED = {"gemma2", "gemma3"}  # whose norms multiply by 1 + w


def build(name: str, spread: float = 0.2, **changes):
    kind, keys = ARCHITECTURES[name]
    torch.manual_seed(1)
    config = getattr(transformers, kind)(**keys | changes)
    reference = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    jitter(reference, spread)
    return reference.eval()


def ours(weights) -> Model:
    """Our model with the weights of read_hf, which it does not draw before."""
    with torch.device("meta"):
        model = Model(ModelConfig(**weights.flags))
    assert list(weights) == [name for name, _ in model.named_parameters()]
    assert len(weights) == len(list(weights))
    tensors = dict(weights)
    assert {x.dtype for x in tensors.values()} == {torch.float32}
    model.load_state_dict(tensors, strict=False, assign=True)  # the shapes must be the same
    model.tie()
    return model.eval()


def tokens(length: int = T) -> torch.Tensor:
    return torch.randint(V, (2, length), generator=torch.Generator().manual_seed(4))


def assert_same_logits(model: Model, reference, tolerance: float = 1e-5):
    with torch.no_grad():
        got, expected = (x if torch.is_tensor(x) else x.logits for x in (model(tokens()), reference(tokens())))
    assert expected.std() > 0.1
    assert (got - expected).abs().max() < tolerance * max(1.0, expected.abs().max())


def write(folder, model: Model, dtype=torch.float32, tokenizer=None, remote_code: bool = False):
    folder.mkdir()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    write_hf(folder, model.cfg, parameters.get, dtype, tokenizer, remote_code)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_in_and_out(tmp_path, name):
    reference = build(name)
    reference.save_pretrained(tmp_path / "theirs")
    weights = read_hf(tmp_path / "theirs")
    model = ours(weights)
    assert_same_logits(model, reference)

    write(tmp_path / "ours", model)
    assert read_hf(tmp_path / "ours").flags == weights.flags
    again = loaded(tmp_path / "ours")
    assert type(again) is type(reference)
    assert again.dtype == torch.float32
    assert_same_logits(model, again)
    if name not in FOLDED:
        before = reference.state_dict()
        after = again.state_dict()
        assert before.keys() == after.keys()
        assert all(torch.equal(before[each], after[each]) for each in before)

    prompt = tokens(8)
    n = 6  # more than a window
    options = dict(max_new_tokens=n, do_sample=False, attention_mask=torch.ones_like(prompt))
    text = torch.stack(list(generate(model, prompt, n, lambda z: z.argmax(-1))), dim=1)
    assert torch.equal(text, again.generate(prompt, **options)[:, 8:])


# ---- ours, out: flags of ours -> the family that expresses them

LLAMA_LIKE = dict(norm="rmsnorm", mlp="swiglu", pos="rope")
GEMMA3_LIKE = LLAMA_LIKE | dict(mlp="geglu_tanh", norm_placement="sandwich", qk_norm=True, embed_scale=32**0.5)
FRACTIONAL = ["yarn:4:10.9", f"yarn:{T / 10.9}", "llama3:8:1:4:10.9"]  # an original context of 10 gives other logits
EXPERTS = dict(n_expert=4, expert_ratio=3.0, router_balance="none")
CHOICES = {
    "gpt2": [
        {},
        dict(bias=True, last_norm="layernorm", scaled_init=False),
        dict(mlp="relu2", tie_weights=False),
        dict(block="c,p"),
    ],
    "llama": [
        LLAMA_LIKE,
        LLAMA_LIKE | dict(head_dim=4, mlp="geglu", rope_scaling="yarn:4", rope_theta=7.8),
        LLAMA_LIKE | dict(bias=True),
        *(LLAMA_LIKE | dict(rope_scaling=each, rope_theta=7.8) for each in FRACTIONAL),
    ],
    "mistral": [LLAMA_LIKE | dict(window=WINDOW, norm_eps=1e-6, attention="mqa")],
    "qwen2": [LLAMA_LIKE | dict(qkv_bias=True), LLAMA_LIKE | dict(window=WINDOW, window_pattern="LLS")],
    "qwen3": [LLAMA_LIKE | dict(qk_norm=True, window=WINDOW, window_pattern="LS")],
    "mixtral": [LLAMA_LIKE | EXPERTS | dict(window=WINDOW)],
    "qwen3_moe": [LLAMA_LIKE | EXPERTS | dict(qk_norm=True, n_expert_active=3)],
    "gemma3_text": [GEMMA3_LIKE | dict(logit_softcap=2.0)],
}


TO_A_FAMILY = [(family, None, flags) for family, each in CHOICES.items() for flags in each]
TO_A_FAMILY += [("llama", ByteTokenizer(), LLAMA_LIKE | dict(qkv_bias=True))]  # transformers gives Qwen2 its own ids
IN_NONE = [  # and which flags no family has
    (dict(block="simplified"), "block=simplified"),
    (dict(objective="masked"), "objective=masked"),
    (dict(conv=4), "conv=4"),
    (LLAMA_LIKE | dict(norm_placement="post"), "norm_placement=post"),
    (dict(block="c.own_slots"), "block=c.own_slots"),
    (GEMMA3_LIKE | dict(attn_softcap=2.0), "qk_norm=True"),
]


def cfg_of(**flags) -> ModelConfig:
    return ModelConfig(n_layer=L, n_head=4, n_embd=32, block_size=T, vocab_size=V, **flags)


def loaded(folder, **more):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", **more).eval()


@pytest.mark.parametrize("family, tokenizer, flags", TO_A_FAMILY)
def test_the_first_family_that_expresses_the_flags(tmp_path, family, tokenizer, flags):
    """Also where theirs has biases that ours has not."""
    model = Model(cfg_of(**flags), seed=1).eval()
    torch.manual_seed(2)
    jitter(model, 0.2)
    assert choose(model.cfg, tokenizer)[1] == family
    write(tmp_path / "out", model, tokenizer=tokenizer)
    assert_same_logits(model, loaded(tmp_path / "out"))
    assert_same_logits(model, ours(read_hf(tmp_path / "out")))


@pytest.mark.parametrize("flags, words", IN_NONE)
def test_no_family(flags, words):
    with pytest.raises(ValueError, match=f"no family of Hugging Face has .*{words}.*--remote_code=True"):
        choose(cfg_of(**flags))


# ---- config.json as it was published, and the number of parameters that its model is known to have

PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text())
KNOWN = {
    "gpt2": (124439808, dict(bias=True, mlp="gelu_tanh", norm_eps=1e-5)),
    "Llama-3.1-8B": (
        8030261248, dict(rope_scaling="llama3:8:1:4:8192", rope_theta=5e5, mlp="swiglu", n_kv_head=8),
    ),
    "Mixtral-8x7B": (46702792704, dict(n_expert=8, n_expert_active=2, mlp="swiglu", router_balance="none")),
    "Qwen3-30B-A3B": (30532122624, dict(n_expert=128, n_expert_active=8, qk_norm=True, head_dim=128)),
    "gemma-3-1b": (
        999885952, dict(window_pattern="SSSSSL", pos_pattern="LLLLLG", rope_theta=1e6, rope_theta_local=1e4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(name):
    config = PUBLISHED[name]
    (n_params, flags) = KNOWN[name]
    found = FAMILIES[config["model_type"]].flags(config)
    assert {name: found.get(name) for name in flags} == flags
    assert sum(shape.numel() for shape in shapes_of(ModelConfig(**found)).values()) == n_params


# ---- files


@pytest.fixture
def folder(tmp_path):
    """A Llama in two sizes of file."""
    reference = build("llama")
    reference.save_pretrained(tmp_path / "llama")
    reference.save_pretrained(tmp_path / "shards", max_shard_size="30KB")
    return tmp_path


def test_shards(folder, monkeypatch):
    """All that lie there are read, and a number only when it is used; what is in none of them or in two is named."""
    one = read_hf(folder / "llama")
    many = read_hf(folder / "shards")
    used = []
    make = Pretrained._tensor
    monkeypatch.setattr(Pretrained, "_tensor", lambda weights, name: used.append(name) or make(weights, name))
    read_hf(folder / "shards")["blocks.1.sums.0.attn.qkv.weight"]
    assert used == [f"model.layers.1.self_attn.{each}_proj.weight" for each in "qkv"]
    assert all(torch.equal(one[name], many[name]) for name in one)
    shutil.copy(folder / "llama" / SAFE, folder / "llama" / "consolidated.safetensors")  # as beside Mistral's
    assert read_hf(folder / "llama").keys() == one.keys()
    files = sorted((folder / "shards").glob("model-*.safetensors"))
    assert len(files) > 3
    mapped = Path("/proc/self/maps").read_text()
    assert all(str(file) in mapped for file in files)
    files[1].unlink()
    with pytest.raises(ValueError, match=r"\S+ is absent, .*; download all files"):
        read_hf(folder / "shards")
    shutil.copy(files[0], files[1])
    with pytest.raises(ValueError, match=f"{files[1].name}: another file has '.*' too; download"):
        read_hf(folder / "shards")


def test_names_of_the_base_model_and_buffers_of_old_files(tmp_path):
    """GPT-2's own file has no `transformer.`, and the mask of every layer. A head beside the embedding is the same."""
    reference = build("gpt2")
    reference.save_pretrained(tmp_path / "gpt2")
    file = tmp_path / "gpt2/model.safetensors"
    state = load_file(file)
    base = {name.removeprefix("transformer."): x for name, x in state.items()}
    save_file(base | {f"h.{i}.attn.bias": torch.ones(1, 1, T, T, dtype=torch.bool) for i in range(L)}, file)
    assert_same_logits(ours(read_hf(tmp_path / "gpt2")), reference)
    save_file(state | {"lm_head.weight": state["transformer.wte.weight"].clone()}, file)
    assert_same_logits(ours(read_hf(tmp_path / "gpt2")), reference)
    save_file(state | {"lm_head.weight": state["transformer.wte.weight"] + 1}, file)
    with pytest.raises(ValueError, match="lm_head.weight differs .* tied"):
        read_hf(tmp_path / "gpt2")["wte.weight"]


def config(**changes):
    def change(folder):
        found = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps({name: x for name, x in found.items() if x != "absent"}))

    return change


def tensor(make, name: str = "model.norm.weight"):
    def change(folder):
        state = load_file(folder / "model.safetensors")
        save_file(state | {name: make(state["model.norm.weight"])}, folder / "model.safetensors")

    return change


SAFE = "model.safetensors"
DAMAGE = [
    (lambda f: (f / "config.json").unlink(), "has no config.json"),
    (lambda f: os.truncate(f / "config.json", 40 * 2**30), "config.json holds no JSON object .*more than"),
    (config(model_type="falcon"), "model_type='falcon' is not known; .*gemma3_text"),
    (config(is_causal=False, foo=1, q="x"), "nothing here reads 'foo'=1; delete it if"),
    (config(hidden_size="absent"), "n_embd=None .hidden_size.: expected int"),
    (config(num_hidden_layers=40), r"model.layers.3.\S+ is absent, and should have the shape"),
    (
        lambda f: (f / SAFE).rename(f / "pytorch_model.bin"),
        f"has no {SAFE} .pickles are not read.; .*safe_serialization=True",
    ),
    (lambda f: os.truncate(f / SAFE, (f / SAFE).stat().st_size - 100), f"{SAFE} is damaged"),
    (tensor(lambda x: x[:4]), r"model.norm.weight is \(4,\), and should be \(48,\)"),
    (tensor(lambda x: x.to(torch.int8)), r"model.norm.weight is int8, as in a quantised model; "),
    (tensor(torch.clone, "model.layers.3.other.weight"), "'model.layers.3.other.weight' is no weight"),
    (tensor(lambda x: x * math.nan), "model.norm.weight holds numbers that are not finite"),
]


def test_damaged_folders(folder):
    for damage, words in DAMAGE:
        shutil.copytree(folder / "llama", folder / "damaged")
        damage(folder / "damaged")
        with pytest.raises((ValueError, OSError), match=words) as error:
            dict(read_hf(folder / "damaged"))
        assert re.fullmatch(r".*(; |, such as ).*", str(error.value))
        assert len(str(error.value)) < 500
        shutil.rmtree(folder / "damaged")


def test_a_model_of_the_hub(folder, monkeypatch):
    """What is downloaded: its configurations and weights, no pickles and no second copies."""
    wanted = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors", "tokenizer.json"]
    others = ["pytorch_model.bin", "consolidated.safetensors", "original/params.json", "onnx/model.onnx"]

    def download(name, **patterns):
        assert name == "org/model"
        assert sorted(filter_repo_objects(wanted + others, **patterns)) == wanted
        return str(folder / "llama")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert read_hf("org/model").flags == read_hf(folder / "llama").flags


def test_a_name_of_the_hub_without_a_network(monkeypatch):
    def offline(name, **options):
        raise OSError("no network\nat all")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    for name, words in (
        ("org/model", "no folder org/model, .* hub .OSError.; .*hf download org/model"),
        ("/nowhere/at/all", "there is no folder /nowhere/at/all, and no such model"),
        ("", "hf: names no model"),
    ):
        with pytest.raises(ValueError, match=words):
            read_hf(name)


# ---- train.py, and the command that exports


def export(*arguments):
    commands.main(["export", *map(str, arguments)])


def test_training_starts_from_hugging_face(run, many, tiny_data, tmp_path):
    """And two ranks compute what one does. The vocabulary is odd, and exports have no padding rows of tp."""
    sizes = dict(num_hidden_layers=2, hidden_size=16, num_attention_heads=2, num_key_value_heads=2)
    sizes |= dict(intermediate_size=48, vocab_size=271, max_position_embeddings=16)
    reference = build("llama", spread=0.05, **sizes)
    reference.save_pretrained(tmp_path / "small")
    flags = ["--max_iters=2", "--eval_interval=2", "--eval_iters=0", "--warmup_iters=1"]
    flags.append(f"--init_from=hf:{tmp_path / 'small'}")
    alone = run(*flags, IN_FLOAT64)
    rows = torch.tensor(tokens_of(tiny_data, "val")).unfold(0, 17, 16)
    with torch.no_grad():
        logits = reference(rows[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()
    assert metrics(alone)[0]["val_loss"] == pytest.approx(expected, rel=1e-5)
    stored = (alone / "config.py").read_text()
    assert "vocab_size = 271" in stored
    assert "norm = 'rmsnorm'" in stored

    layouts = {"fsdp, wide": ["--parallel=fsdp", IN_FLOAT64], "tp, wide": ["--tp=2", IN_FLOAT64], "tp": ["--tp=2"]}
    together = many(2, *((name, [*flags, *layout]) for name, layout in layouts.items()))
    for name in ("fsdp, wide", "tp, wide"):
        assert distance(losses(together / name), losses(alone)) < 1e-9, name
    export(together / "tp", tmp_path / "exported")
    exported = read_hf(tmp_path / "exported")
    trained = weights_in(alone)
    assert all((exported[each] - x).abs().max() < 1e-4 for each, x in trained.items())
    assert exported["head.weight"].shape == (271, 16)
    assert exported.keys() == trained.keys()


def test_export_of_a_run(trained, tmp_path, capsys):
    export(trained / "best", tmp_path / "out", "--dtype=bfloat16")
    assert "the weights of" in capsys.readouterr().out
    export(trained, tmp_path / "exact")
    _, model, _ = load_model(str(trained), torch.device("cpu"), torch.float32)
    reference = loaded(tmp_path / "exact")
    idx = torch.randint(257, (2, 16))
    with torch.no_grad():
        torch.testing.assert_close(reference.double()(idx).logits, model.double()(idx), atol=1e-9, rtol=0)
    assert reference.generation_config.eos_token_id == reference.config.bos_token_id == 256
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "exact")
    assert tokenizer("été<|endoftext|>").input_ids == [*"été".encode(), 256]
    rounded, exact = (load_file(tmp_path / f"{name}/model.safetensors") for name in ("out", "exact"))
    assert all(torch.equal(x.bfloat16(), rounded[name]) for name, x in exact.items())
    export(f"hf:{tmp_path / 'exact'}", tmp_path / "again")
    for file in (tmp_path / "exact").iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()
    assert (tmp_path / "out").stat().st_mode & 0o444 == (tmp_path / "out/model.safetensors").stat().st_mode & 0o444


def test_remote_code(trained, tmp_path, modules_cache):
    export(trained, tmp_path / "out", "--remote_code=True", "--dtype=float16")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["eos_token_id"] == 256
    assert config["flags"]["n_embd"] == 16
    reference = loaded(tmp_path / "out", trust_remote_code=True)
    found = reference.model.state_dict()
    expected = weights_in(trained)
    again = read_hf(tmp_path / "out")
    assert expected
    assert all(torch.equal(found[name], x.half()) for name, x in expected.items())
    assert all(torch.equal(again[name], x.half().float()) for name, x in expected.items())
    assert again.flags == {name: config["flags"][name] for name in again.flags}
    write_json(tmp_path / "out/config.json", {"model_type": "superblock", "flags": []})
    with pytest.raises(ValueError, match="no flags"):
        read_hf(tmp_path / "out")


TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def test_what_stands_beside_the_weights_is_written_again(tmp_path):
    """All ids that end a text, the template of chats and the longest text; they are kept in a run's checkpoints."""
    (there := tmp_path / "there").mkdir()
    train_bpe(["one two three one two"] * 9, 259).save(there)
    kept = {"chat_template": TEMPLATE, "model_max_length": 77, "eos_token": "<|endoftext|>"}
    write_json(there / "tokenizer_config.json", kept)
    write_json(there / "generation_config.json", {"eos_token_id": [258, 0, 7]})
    tokenizer = HFTokenizer.from_folder(there)
    assert (tokenizer.eot, tokenizer.ends) == (0, {0, 7, 258})
    tokenizer = from_spec(json.loads(json.dumps(tokenizer.spec)), there)
    model = Model(ModelConfig(n_layer=1, n_head=2, n_embd=8, block_size=8, vocab_size=259), seed=1)
    write(tmp_path / "out", model, tokenizer=tokenizer)
    export_tokenizer(tokenizer, tmp_path / "out", 8)
    assert loaded(tmp_path / "out").generation_config.eos_token_id == [0, 7, 258]
    found = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (found.chat_template, found.model_max_length, found.eos_token_id) == (TEMPLATE, 77, 0)
    assert HFTokenizer.from_folder(tmp_path / "out").ends == tokenizer.ends
    (there / "chat_template.jinja").write_text("newer")  # of newer releases
    assert HFTokenizer.from_folder(there).special["chat_template"] == "newer"


def test_numbers_beyond_a_dtype(tmp_path):
    model = Model(cfg_of(), seed=1)
    with torch.no_grad():
        model.wte.weight[3, 2] = 1e5
    with pytest.raises(ValueError, match="wte.weight has numbers that are not finite in float16; export with"):
        write(tmp_path / "out", model, torch.float16)


def test_a_refused_export_leaves_nothing(trained, tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("engine.checkpoint.file_format.write", full)
        refused(commands.main, ["export", trained, tmp_path / "out"], capsys, [f"{tmp_path}/out: No space left"])
    assert not list(tmp_path.iterdir())
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for run, where, flags, words in (
        (trained, tmp_path / "out", [], "is there already"),
        (trained, tmp_path / "link", [], "is there already"),
        (tmp_path, tmp_path / "new", [], "no checkpoint in"),
        (trained, tmp_path / "no" / "out", [], f"there is no folder {tmp_path}/no; make it"),
    ):
        refused(commands.main, ["export", run, where, *flags], capsys, [words])
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["link", "out"]
    for arguments in ([], ["export", "a"], ["export", "a", "b", "--dtype=int8"], ["import", "a", "b"]):
        assert re.fullmatch("error: .*(; |, such as ).*\n", refused(commands.main, arguments, capsys))
