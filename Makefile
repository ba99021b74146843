# make train: environment, data, a trained model and a sample.   make test: environment and all tests but the slow.
# make quick: for whoever edits model.py, half a minute: the grid of flags, the references and golden losses.
# make mutants: do the tests see faults that are planted in the code? Some minutes.
# make interop: an export in a task of lm-eval, and a run in wandb. Both packages have an environment of their own.
# make baselines: rows A of docs/baselines.md, blocks with rates of their own: 75 minutes; a stopped call goes on.
# make gpu: on a machine with a GPU: is all computed as on the CPU in float64, and how fast does GPT-2 train?
# All need only a Python >= 3.10 with pip, write nothing outside this folder but caches, and skip what is already done.

PYTHON ?= python3
BIN := .venv/bin
RUN := out/pycode

.PHONY: train test quick slow mutants baselines gpu interop clean

train: .venv/ready data/pycode/meta.json
	$(BIN)/python train.py config/train_pycode.py --out_dir=$(RUN) --init_from=$(if $(wildcard $(RUN)/latest),resume,scratch)
	$(BIN)/python sample.py --out_dir=$(RUN) --start='    """Return the ' --temperature=0.5 --seed=25 --max_new_tokens=200
	@echo 'next: $(BIN)/python sample.py --out_dir=$(RUN) --start="if __name__" --temperature=0.5'
	@echo 'or train the standard block: $(BIN)/python train.py config/pycode_standard.py'

test quick: export PYTHONDONTWRITEBYTECODE =# even where it is set: else each of the processes compiles all files anew
test: .venv/ready-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 3 --dist worksteal

quick: .venv/ready-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --brief --numprocesses 2 --dist worksteal -k "not golden or causal" \
		tests/model/test_grid.py tests/model/test_naive.py::test_any_flags tests/model/test_ignored.py \
		tests/model/test_references.py tests/training/test_golden.py \
		tests/parallel/test_gradients.py::test_a_new_flag_has_its_gradients_on_every_layout_or_is_refused_by_name

baselines: .venv/ready-test data/pycode/meta.json
	$(BIN)/python -m tools.compare --out=out/baselines --seeds=3 --jobs=2 --sweep=muon_lr=0.01,0.02 \
		--common="config/train_pycode.py --block=superblock --dtype=float32" \
		--run="--block=c,p --conv=0 --value_embedding=False" --run="--block=c,p --value_embedding=False" \
		--run="--block=c+p --conv=0 --value_embedding=False" --run="--block=c+p --value_embedding=False" \
		--run="--block=c.none+p --conv=0 --n_layer=6 --mlp_ratio=2 --value_embedding=False" \
		--run="--block=c.none+p --n_layer=6 --mlp_ratio=2 --value_embedding=False" \
		--run="--block=simplified_parallel --conv=0" --run=--block=simplified_parallel

gpu: .venv/ready-test data/pycode/meta.json
	$(BIN)/python -m pytest -m gpu --device=cuda
	$(BIN)/python -m tools.bench --rounds=1 config/train_gpt2.py --dataset=pycode --vocab_size=50304 \
		--gradient_accumulation_steps=5 --max_iters=200

slow: .venv/ready-test
	$(BIN)/python -m pytest -m slow

mutants: .venv/ready-test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutants

interop: .venv-interop/ready
	OMP_NUM_THREADS=1 .venv-interop/bin/python -m pytest -m interop

data/pycode/meta.json: data/pycode/prepare.py | .venv/ready
	$(BIN)/python $<

.venv/ready: pyproject.toml
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10) and 'error: Python 3.10 or newer is needed, and $(PYTHON) is ' + sys.version.split()[0] + '; run make PYTHON=python3.11')"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet torch==2.13.0 --editable .
	touch $@

.venv/ready-test: .venv/ready
	$(BIN)/python -m pip install --quiet torch==2.13.0 --editable ".[test]"
	touch $@

.venv-interop/ready: pyproject.toml
	test -x .venv-interop/bin/python || $(PYTHON) -m venv .venv-interop
	.venv-interop/bin/python -m pip install --quiet torch==2.13.0 --editable ".[interop]"
	touch $@

clean:
	rm -rf .venv .venv-interop *.egg-info out
