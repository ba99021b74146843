# PaLM's network (arXiv:2204.02311) with pycode_standard.py's optimizer, 2 to 3 minutes on 2 cores: attention and MLP in
# parallel, one key for all heads, RoPE, SwiGLU. The learning rates are not tuned: muon_lr has its default, 0.02.
# Validation loss 1.301 nats per byte (measured 2026-11-22).
dataset = "pycode"
out_dir = "out/pycode_palm"

n_layer = 4
n_head = 4
n_embd = 192
block_size = 256
batch_size = 8
gradient_accumulation_steps = 1
block = "parallel"
attention = "mqa"
pos = "rope"
mlp = "swiglu"

optimizer = "muon"
max_iters = 450
learning_rate = 3e-3
min_lr = 0.0
schedule = "wsd"
warmup_iters = 20
cooldown_iters = 150

eval_interval = 150
eval_iters = 60
log_interval = 10
compile = True
