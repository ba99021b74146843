"""The two lines of docs/interchange.md that evaluate a run with lm-eval, as a user types them; make interop runs it."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine import weights
from tests.helpers import ROOT

pytestmark = pytest.mark.interop
QUESTIONS = [("the cat", [" sat on", " a mat."]), ("dogs", [" bark;", " the cat", " a"]), ("sat", [" on", " no", " x"])]
TASK = """
task: mine
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {}}}}}
validation_split: validation
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


def lines_of_the_page() -> list[str]:
    page = (ROOT / "docs/interchange.md").read_text(encoding="utf-8")
    return page.partition("## Tasks of lm-eval")[2].split("```")[1].strip().splitlines()


def type_in(line: str, cache: Path) -> None:
    """Runs the line with this environment's python and lm_eval, without a network."""
    commands = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    offline = dict(HF_HOME=str(cache), HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")
    subprocess.run(shlex.split(line), cwd=ROOT, env=os.environ | offline | {"PATH": commands}, check=True)


def log_likelihoods(run: Path) -> list[list[float]]:
    _, model, tokenizer = weights.load_model(str(run), torch.device("cpu"), torch.float32)
    model = model.double()
    out = []
    for question, choices in QUESTIONS:
        scores = []
        for choice in choices:
            ids = torch.from_numpy(tokenizer.encode(question + choice))
            log_p = model(ids[None, :-1])[0].log_softmax(dim=-1)
            n = len(tokenizer.encode(choice))
            scores.append(log_p[-n:].gather(1, ids[-n:, None]).sum().item())
        out.append(scores)
    return out


@pytest.mark.parametrize("flags", [["--pos=rope", "--norm=rmsnorm", "--mlp=swiglu"], ["--block=c.own_slots,p"]])
def test_the_two_lines(run, tmp_path, flags):
    trained = run("--max_iters=10", *flags)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/mine.yaml").write_text(TASK.format(tmp_path / "questions.jsonl"))
    rows = [{"question": question, "choices": choices, "answer": 0} for question, choices in QUESTIONS]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))

    export, evaluate = lines_of_the_page()
    export = export.replace("out/mine", str(trained)).replace("exported", str(tmp_path / "exported"))
    own = f"mine --include_path {tmp_path / 'tasks'} --output_path {tmp_path / 'results'} --log_samples"
    evaluate = evaluate.replace("exported", str(tmp_path / "exported")).replace("lambada_openai", own)
    type_in(export, tmp_path)
    type_in(evaluate, tmp_path)

    expected = log_likelihoods(trained)
    (samples,) = (tmp_path / "results").rglob("samples_mine_*.jsonl")
    answers = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda each: each["doc_id"])
    found = [[float(score) for score, _ in each["filtered_resps"]] for each in answers]
    for scores, wanted in zip(found, expected, strict=True):
        assert scores == pytest.approx(wanted, abs=1e-4)
