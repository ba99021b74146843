"""Our models under lm-eval, compared with lm-eval's own `hf` model on a folder of the same weights.

make interop runs this file: lm-eval draws in some forty packages, so it has an environment of its own.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from test_hf_tokenizer import TEXTS, sentencepiece
from test_references import LLAMA, OUR_LLAMA, SIZE, complete, jitter, llama_weights

from data.hf_tokenizer import HFTokenizer
from data.tokenizer import ByteTokenizer, CharTokenizer, train_bpe
from engine.interchange.huggingface import write_hf
from engine.interchange.tokenizer import export_tokenizer
from model import Model, ModelConfig

pytestmark = pytest.mark.interop
LENGTH = 48  # block_size


@torch.no_grad()
def never_odd_bytes(rows, tokenizer):
    """Lets the model generate only ASCII: text that is not UTF-8 is printed in different ways."""
    for row, token in zip(rows, tokenizer.token_bytes, strict=True):
        row *= token.isascii()


def llama(folder):
    """(our model, our tokenizer): a Llama with a tokenizer like Llama's, which puts <s> before every text."""
    from transformers import LlamaConfig, LlamaForCausalLM

    content = sentencepiece(True).to_str().encode()
    tokenizer = HFTokenizer(content, {"eos_token": "</s>", "bos_token": "<s>"}, "x")
    size = dict(vocab_size=tokenizer.vocab_size, max_position_embeddings=LENGTH)
    reference = jitter(LlamaForCausalLM(LlamaConfig(**LLAMA | size | dict(eos_token_id=tokenizer.eot)))).float()
    never_odd_bytes(reference.lm_head.weight, tokenizer)
    reference.save_pretrained(folder)
    flags = SIZE | OUR_LLAMA | dict(vocab_size=tokenizer.vocab_size, block_size=LENGTH)
    model = Model(ModelConfig(**flags))
    model.load_state_dict(complete(model, llama_weights(reference)))
    return model, tokenizer


def superblock(folder):
    """A superblock with our own tokenizer, which transformers loads as remote code."""
    tokenizer = train_bpe(TEXTS, 400)
    flags = dict(block="superblock", layer="c.own_slots", pos="alibi", n_slot=5)
    model = jitter(Model(ModelConfig(**SIZE | flags | dict(vocab_size=400, block_size=LENGTH)), seed=1)).float()
    never_odd_bytes(model.wte.weight, tokenizer)
    parameters = dict(model.named_parameters())
    write_hf(folder, model.cfg, lambda name: parameters[name].detach(), torch.float32, tokenizer, remote_code=True)
    return model, tokenizer


@pytest.fixture(scope="module", params=[llama, superblock], ids=lambda f: f.__name__)
def both(request, tmp_path_factory):
    """Our harness, and lm-eval's model."""
    from lm_eval.models.huggingface import HFLM

    from engine.interchange.harness import Harness

    folder = tmp_path_factory.mktemp("exported")
    model, tokenizer = request.param(folder)
    export_tokenizer(tokenizer, folder)
    theirs = HFLM(str(folder), device="cpu", dtype="float32", batch_size=3, trust_remote_code=True)
    return Harness(model.eval(), tokenizer, batch_size=4, device="cpu"), theirs


def requests(*arguments) -> list:
    return [SimpleNamespace(args=each, task_name="x") for each in arguments]


WORDS = " ".join(TEXTS[0].split())
PAIRS = [
    ("", "the"),
    ("", " a much longer text"),
    ("the quick ", "brown fox"),
    ("the quick   ", "a"),
    *((f"Question {i}: {WORDS[i * 20 : i * 37]}\nAnswer:", choice) for i in range(9) for choice in (" A", " B", " no")),
    (WORDS[:3000], " and the end"),  # cut from the left
    ("x", WORDS[300:340]),
    ("\U0001f600 naïve", "«été»\n\n"),
]


def test_loglikelihood(both):
    ours, theirs = (lm.loglikelihood(requests(*PAIRS), disable_tqdm=True) for lm in both)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    assert [score for score, _ in ours] == pytest.approx([score for score, _ in theirs], abs=1e-4)


def test_a_greedy_continuation_is_known_as_such(both):
    lm, theirs = both
    [text] = lm.generate_until(requests(("the block", {"until": [], "max_gen_toks": 3})), disable_tqdm=True)
    found = [each.loglikelihood(requests(("the block", text)), disable_tqdm=True)[0] for each in both]
    assert found[0][1] == found[1][1] and found[0][0] == pytest.approx(found[1][0], abs=1e-4)


def test_a_context_without_tokens_is_end_of_text(both):
    """Also one of white space, which lm-eval moves into the continuation, even if that is one token then."""
    lm, _ = both
    for context, continuation in ((" ", "the"), ("\n", "")):
        pairs = requests((context, continuation), ("", context + continuation))
        found, expected = lm.loglikelihood(pairs, disable_tqdm=True)
        assert found == pytest.approx(expected, abs=1e-4) and expected[0] < 0
    ids = [lm.prefix_token_id]
    for _ in range(3):
        ids.append(int(lm.ours(torch.tensor([ids]))[0, -1, : lm.vocabulary.vocab_size].argmax()))
    [text] = lm.generate_until(requests(("", {"until": [], "max_gen_toks": 3})), disable_tqdm=True)
    assert text == lm.vocabulary.decode(ids[1:])


def test_loglikelihood_rolling(both):
    texts = requests(("",), ("a",), (WORDS[:60],), (WORDS[:1000],), (TEXTS[1],))
    ours, theirs = (lm.loglikelihood_rolling(texts, disable_tqdm=True) for lm in both)
    assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-4)


def test_generate_until(both):
    settings = [{"until": ["e", "\n"], "max_gen_toks": 20}, {"until": "zz", "max_gen_toks": 11}, {"max_gen_toks": 5}]
    contexts = ["the", "the block", WORDS[:70], WORDS[:900], "def", "é"]
    texts = requests(*((context, options | {"do_sample": False}) for context in contexts for options in settings))
    ours, theirs = (lm.generate_until(texts, disable_tqdm=True) for lm in both)
    assert ours == theirs and len({*ours}) > len(contexts)


CHOICE = """task: choice
dataset_path: json
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}\\nAnswer:"
doc_to_target: "{{answer}}"
doc_to_choice: "{{choices}}"
num_fewshot: 0
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
PERPLEXITY = """task: perplexity
dataset_path: json
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
"""
GENERATE = """task: generate
dataset_path: json
output_type: generate_until
test_split: test
doc_to_text: "{{question}}"
doc_to_target: "{{question}}"
generation_kwargs: {until: ["e"], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match}]
"""


def test_tasks(both, tmp_path):
    """Whole tasks, as the command runs them: the figures, and every answer behind them."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    docs = [
        {"question": WORDS[i * 50 : i * 50 + 30 + 10 * i], "choices": [" A", " the block", f" {i}"], "answer": i % 3}
        for i in range(12)
    ]
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    place = {"data_files": {"test": str(tmp_path / "docs.jsonl")}, "cache_dir": str(tmp_path / "cache")}
    for task in (CHOICE, PERPLEXITY, GENERATE):
        (tmp_path / f"{task.split()[1]}.yaml").write_text(task + f"dataset_kwargs: {json.dumps(place)}\n")
    tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)
    names = ["choice", "perplexity", "generate"]
    options = dict(tasks=names, task_manager=tasks, bootstrap_iters=0, log_samples=True)
    ours, theirs = (lm_eval.simple_evaluate(model=lm, **options) for lm in both)
    for name in names:
        figures = [{k: v for k, v in each["results"][name].items() if isinstance(v, float)} for each in (ours, theirs)]
        assert figures[0] == pytest.approx(figures[1], rel=1e-4) and figures[0]
        answers = [[sample["filtered_resps"] for sample in each["samples"][name]] for each in (ours, theirs)]
        assert answers[0] == answers[1] or name != "generate"
    assert len(ours["samples"]["choice"]) == 12 and ours["results"]["perplexity"]["bits_per_byte,none"] > 0


@pytest.mark.parametrize(
    "call,words",
    [
        (lambda lm: lm.loglikelihood(requests(("a", "b" * 99))), "a continuation of 99 tokens does not fit in block"),
        (lambda lm: lm.generate_until(requests(("a", {"max_gen_toks": 48}))), "max_gen_toks=48 leaves no room"),
        (lambda lm: lm.generate_until(requests(("a", {"temperature": 1.0}))), "do_sample=True needs sampling"),
    ],
)
def test_what_cannot_run_is_one_line(call, words):
    from engine.interchange.harness import Harness

    model = Model(ModelConfig(**SIZE | dict(vocab_size=257, block_size=LENGTH)))
    with pytest.raises(ValueError, match=words) as e:
        call(Harness(model, ByteTokenizer(), 2, "cpu"))
    assert "\n" not in str(e.value)
    with pytest.raises(ValueError, match="tokenizer char has no end-of-text"):
        Harness(model, CharTokenizer("ab"), 2, "cpu")
    masked = Model(ModelConfig(**SIZE | dict(vocab_size=300), objective="masked"))
    with pytest.raises(ValueError, match="objective=masked cannot run tasks"):
        Harness(masked, ByteTokenizer(), 2, "cpu")
