"""Pictures of plot.py: their lines compared with metrics.jsonl, their legends, bands and files."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.helpers import metrics, refused
from tools import curves, plot

pytest.importorskip("matplotlib", reason="needs matplotlib; run pip install -e .[test]")
from PIL import Image  # noqa: E402

T = 64  # tokens of a step


@pytest.fixture
def make(tmp_path):
    """make("a", seed=1, ...) writes the files of a run of 45 steps, which logs every 10th; returns its folder."""

    def call(name: str, **flags) -> str:
        folder = tmp_path / name
        rng = np.random.default_rng(flags.get("seed", 0))
        folder.mkdir()
        rows = []
        for step in range(46):
            if step in (0, 15, 30, 45):
                rows.append({"step": step, "kind": "eval", "val_loss": 3 - step / 50, "val_bpb": None})
            if step % 10 == 0:
                tokens = (step + 1) * T
                speed = (step + 10) * T / 10
                row = {"step": step, "kind": "train", "loss": 3 - step / 50 + rng.random(), "tokens": tokens}
                rows.append(row | {"flops": 100 * tokens, "tokens_per_s": speed, "grad_norm": 0.5})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "config.py").write_text("".join(f"{key} = {value!r}\n" for key, value in flags.items()))
        return str(folder)

    return call


@pytest.fixture
def picture(monkeypatch, tmp_path):
    """picture(*arguments) runs plot.py, which writes no file; returns its Figure."""
    figures = []
    monkeypatch.setattr(curves, "save", lambda figure, out: figures.append(figure))

    def call(*arguments: str):
        plot.main([f"--out={tmp_path}/plot.png", *arguments])
        return figures[-1]

    return call


def rows(folder: str, name: str) -> list[dict]:
    return [row for row in metrics(Path(folder)) if row.get(name) is not None]


def lines(figure) -> list[tuple[list[float], list[float]]]:
    return [(line.get_xdata().tolist(), line.get_ydata().tolist()) for line in figure.axes[0].lines]


def legend(figure) -> list[str]:
    return [text.get_text().replace("\n", " ") for text in figure.axes[0].get_legend().get_texts()]


def band(axes) -> list[tuple[float, float]]:
    """The lowest and the highest y of the band at each of its x."""
    (path,) = axes.collections[0].get_paths()
    ends = {}
    for x, y in path.vertices.tolist():
        ends.setdefault(x, []).append(y)
    return [(min(ends[x]), max(ends[x])) for x in sorted(ends)]


def test_a_line_is_metrics_jsonl(make, picture):
    a = make("a", seed=1)
    logged = rows(a, "loss")
    seconds = [1.0] + [10 * T / row["tokens_per_s"] for row in logged[1:]]
    places = {
        "tokens": [row["tokens"] for row in logged],
        "steps": [row["step"] for row in logged],
        "flops": [row["flops"] for row in logged],
        "seconds": np.cumsum(seconds).tolist(),
    }
    for x, expected in places.items():
        figure = picture(a, f"--x={x}")
        ((xs, ys),) = lines(figure)
        assert xs == pytest.approx(expected)
        assert ys == [row["loss"] for row in logged]
        (axes,) = figure.axes
        assert legend(figure) == ["training loss"]
        assert (axes.get_xlabel(), axes.get_ylabel()) == (x, "nats per token")


def test_evaluations_lie_between_logged_steps_and_these_are_smoothed(make, picture):
    """Also the last evaluation, which no logged step follows. Smoothing is the mean of consecutive steps."""
    a = make("a", seed=1)
    figure = picture(a, "--y=loss,val_loss", "--smooth=3", "--ymax=2.5")
    ys = [row["loss"] for row in rows(a, "loss")]
    smooth, evaluations = lines(figure)
    assert smooth[1] == pytest.approx([np.mean(ys[i : i + 3]) for i in range(3)])
    assert smooth[0] == pytest.approx([(10 * i + 1) * T for i in (1, 2, 3)])
    assert evaluations == ([0, 15 * T, 30 * T, 45 * T], pytest.approx([3, 2.7, 2.4, 2.1]))
    assert legend(figure) == ["training loss, mean of 3 logged steps", "validation loss"]
    assert [line.get_marker() for line in figure.axes[0].lines] == ["None", "o"]
    assert figure.axes[0].get_ylim()[1] == 2.5


def test_seeds_are_one_line_with_a_band(make, picture):
    starts = ["scratch", "resume", "scratch"]  # the second run was stopped and resumed
    runs = [make(f"s{n}", seed=n, out_dir=f"s{n}", block="standard", init_from=starts[n - 1]) for n in (1, 2, 3)]
    runs.append(make("other", seed=1, block="parallel", init_from="resume"))
    figure = picture(*runs)
    ys = np.array([[row["loss"] for row in rows(run, "loss")] for run in runs])
    (_, mean), (_, alone) = lines(figure)
    assert mean == pytest.approx(ys[:3].mean(0))
    assert alone == ys[3].tolist()
    assert len(figure.axes[0].collections) == 1
    assert band(figure.axes[0]) == list(zip(ys[:3].min(0), ys[:3].max(0), strict=True))
    of_seeds = "block=standard, training loss, mean and range of 3 runs"
    assert legend(figure) == [of_seeds, "block=parallel, training loss"]
    assert legend(picture(*runs[:3])) == ["training loss, mean and range of 3 runs"]


def test_the_legend_has_the_flags_that_differ(make, picture):
    same = dict(n_layer=2, seed=1)
    runs = [make("a", block="standard", **same), make("b", block="simplified", sas_beta_ff=0.1, **same)]
    assert legend(picture(*runs, "--y=grad_norm")) == ["block=standard, grad_norm", "block=simplified, grad_norm"]
    runs.append(make("c", block="simplified", sas_beta_ff=0.2, **same))
    names = ["block=standard", *(f"block=simplified, sas_beta_ff={beta}" for beta in (0.1, 0.2))]
    assert legend(picture(*runs)) == [f"{name}, training loss" for name in names]
    runs = [make("d"), make("e")]  # without flags
    assert [text.replace(" ", "") for text in legend(picture(*runs))] == [f"{run},trainingloss" for run in runs]


def test_files(make, tmp_path, capsys):
    plot.main([run := make("run"), make("lr=1")])  # without --out, in the first run's folder
    assert capsys.readouterr().out == f"wrote {run}/plot.png\n"
    image = Image.open(f"{run}/plot.png")
    assert image.mode == "RGBA"
    assert image.getpixel((0, 0))[3] == 0
    assert image.width > 1000
    svg = tmp_path / "new" / "a.svg"
    pdf = tmp_path / "a.pdf"
    for out in (svg, pdf):
        plot.main([make(f"run{out.suffix}"), f"--out={out}"])
        assert capsys.readouterr().out == f"wrote {out}\n"
        plot.main([run, f"--out={out}"])  # replaces a picture of its own
        capsys.readouterr()
    assert svg.read_text().startswith("<?xml")
    assert pdf.read_bytes().startswith(b"%PDF-")


def test_intervals_of_a_comparison(picture, tmp_path, capsys):
    """Only seeds that the first run has are compared; a run that has none of them is left out."""
    losses = {"--block=c,p": [1.0, 1.2], "--block=c+p": [1.5, 1.3, 9.0], "--block=p,c": []}
    runs = []
    for words, found in losses.items():
        seeds = {str(seed): {"loss": loss} for seed, loss in enumerate(found, 1)}
        runs.append({"arguments": ["--compile=True", words], "costs": {"tokens": 9}, "seeds": seeds})
    runs.append({**runs[0], "arguments": ["--compile=True", "--block=c,c"], "seeds": {"3": {"loss": 2.0}}})
    (tmp_path / "compare.json").write_text(json.dumps({"runs": runs}))
    (axes,) = picture(str(tmp_path)).axes
    labels = [text.get_text() for text in axes.get_yticklabels()]
    assert labels == ["--block=c,p\n1.100", "--block=c+p\n3.933"]
    of_seeds = [line for line in axes.lines if line.get_linestyle() == "None" and line.get_alpha()]
    points = [line.get_xdata().tolist() for line in of_seeds]
    assert points == [[0, 0], pytest.approx([0.5, 0.1])]
    low, high = axes.collections[-1].get_segments()[0][:, 0]  # the bar of the second run
    assert (low, high) == (pytest.approx(0.3 - 12.706 * 0.2), pytest.approx(0.3 + 12.706 * 0.2))
    (tmp_path / "compare.json").write_text(json.dumps({"runs": runs[2:]}))
    assert "has no two runs with results of one seed yet" in refused(plot.main, [tmp_path], capsys)
    assert "a comparison is drawn without flags" in refused(plot.main, [tmp_path, "--y=val_loss"], capsys)


BOTH = "--block=c,p --muon_lr=0.01", "--block=c+p --muon_lr=0.02"


def compare(folder: Path, tokens: int, *strings: str) -> str:
    """Writes a comparison of runs, whose losses with two seeds are 0.1 below and above a power of the cost."""
    runs = []
    for words, power in zip(strings, (-0.1, -0.2), strict=False):
        loss = 2 * (5 * max(tokens, 1)) ** power
        seeds = {"1": {"loss": loss - 0.1}, "2": {"loss": loss + 0.1}}
        costs = {"tokens": tokens, "flops_per_token": 5.0}
        runs.append({"arguments": ["--compile=True", *words.split()], "costs": costs, "seeds": seeds})
    folder.mkdir()
    (folder / "compare.json").write_text(json.dumps({"runs": runs}))
    return str(folder)


def forget(folder: str):
    """Takes the results of the second run away."""
    file = Path(folder, "compare.json")
    comparison = json.loads(file.read_text())
    comparison["runs"][1]["seeds"] = {}
    file.write_text(json.dumps(comparison))


def test_comparisons_against_their_cost(picture, tmp_path):
    a = compare(tmp_path / "a", 10, *BOTH)
    b = compare(tmp_path / "b", 1000, "--block=c,p", "--block=c+p")
    c = compare(tmp_path / "c", 100, "--block=c,p --conv=0", "--block=c+p --lr=0.1")
    forget(c)
    figure = picture(a, b, c, f"{a}/", "--x=flops")
    assert legend(figure) == ["--block=c,p, a power of -0.100", "--block=c+p, a power of -0.200"]
    one, two = (line for line in figure.axes[0].lines if line.get_linestyle() == "-")
    assert one.get_xdata().tolist() == [50, 500, 5000]
    assert one.get_ydata().tolist() == pytest.approx([2 * cost**-0.1 for cost in (50, 500, 5000)])
    assert two.get_xdata().tolist() == [50, 5000]
    assert two.get_ydata().tolist() == pytest.approx([2 * cost**-0.2 for cost in (50, 5000)])
    low, high = figure.axes[0].collections[0].get_segments()[0][:, 1]
    assert (high - low) / 2 == pytest.approx(12.706 * 0.1)


def test_comparisons_that_have_no_line(tmp_path, capsys):
    a = compare(tmp_path / "a", 10, *BOTH)
    b = compare(tmp_path / "b", 1000, *BOTH)
    forget(half := compare(tmp_path / "half", 100, *BOTH))
    for arguments, words in (
        ([b, "--x=steps"], "x=steps: comparisons are drawn against tokens or flops; set --x=flops"),
        ([b, "--ymax=3"], "comparisons are drawn without y, smooth and ymax"),
        ([tmp_path], "has no compare.json; draw comparisons without other runs"),
        ([half], "--block=c+p --muon_lr=0.02: fewer than two comparisons have results"),
        (
            [compare(tmp_path / "turned", 100, *BOTH[::-1])],
            "run 1 has --block=c,p in one comparison, and not in another",
        ),
        ([compare(tmp_path / "alone", 100, BOTH[0])], "the comparisons have unequal numbers of runs"),
        ([compare(tmp_path / "free", 0, *BOTH)], "no line goes through costs of [0.0, 10.0]"),
        ([compare(tmp_path / "again", 10, *BOTH)], "no line goes through costs of [10.0, 10.0]"),
    ):
        assert words in refused(plot.main, [a, *arguments], capsys)


@pytest.mark.parametrize("name", ["$a$ and $b", "_hidden", "$\\\\frac{$", "\x1b[31mred\n"])
def test_names_are_no_mathematics_and_are_not_hidden(make, picture, name, tmp_path):
    """What a legend and its picture have of a name: its characters, also those of which a backslash is one."""
    runs = [make("a", wandb_run_name=name), make("b", wandb_run_name="b")]
    figure = picture(*runs, "--y=loss")
    shown = name.replace("\x1b", "\\x1b").replace("\n", "\\n")
    assert legend(figure)[0].replace(" ", "") == f"wandb_run_name={shown},trainingloss".replace(" ", "")
    curves.save(figure, tmp_path / "a.svg")


@pytest.mark.parametrize("content", ["", "[]", '{"runs": [3]}', "[" * 100_000], ids=lambda text: text[:50])
def test_an_edited_comparison(content, tmp_path, capsys):
    (tmp_path / "compare.json").write_text(content)
    assert "compare.json is damaged (" in refused(plot.main, [tmp_path], capsys)


def test_refusals(make, tmp_path, capsys):
    a = make("A")
    old = tmp_path / "OLD"
    empty = tmp_path / "EMPTY"
    folder = tmp_path / "FOLDER.png"
    for each, text in ((old, '{"step": 0, "loss": 1.0, "tokens": 64, "tokens_per_s": 9.0}\n'), (empty, "")):
        each.mkdir()
        (each / "metrics.jsonl").write_text(text)
    folder.mkdir()
    mine = tmp_path / "mine.png"
    Image.new("RGB", (9, 9)).save(mine)
    for arguments, words in (
        ([], "expected the folders"),
        ([a, "s3://bucket/run"], "s3://bucket/run: an address; give the path"),
        ([tmp_path / "NONE"], "has no metrics.jsonl; give the out_dir"),
        (["~nobody_of_that_name/x"], "has no metrics.jsonl; give the out_dir"),
        ([a, "--y=nope"], "metrics.jsonl has no number 'nope'; name one"),
        ([a, "--smooth=6"], "smooth=6 is more than the 5 logged steps"),
        ([a, "--out=plot.txt"], "out=plot.txt: pictures have no kind 'txt'; end it in .png, .svg or .pdf"),
        ([old, "--x=flops"], "metrics.jsonl has no logged step with flops; set --x=steps"),
        ([empty], "metrics.jsonl has no row that can be read; train it first"),
        ([a, f"--out={folder}"], "FOLDER.png: Not a regular file"),
        ([a, f"--out={mine}"], "mine.png was not written by this command; "),
    ):
        assert words in refused(plot.main, arguments, capsys)
