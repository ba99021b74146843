# GPT-2's network with pycode_standard.py's optimizer, 2 to 3 minutes on 2 cores: learned positions, LayerNorm, GELU,
# biases. Validation loss 1.549 nats per byte (docs/baselines.md). With nanoGPT's AdamW (cosine, beta2 0.99) it was
# 2.212 for learning_rate 1e-3 and min_lr 1e-4, and 2.486 for 3e-3 and 3e-4 (measured 2026-11-21).
dataset = "pycode"
out_dir = "out/pycode_gpt2"

n_layer = 4
n_head = 4
n_embd = 192
block_size = 256
batch_size = 8
gradient_accumulation_steps = 1
bias = True

optimizer = "muon"
max_iters = 450
muon_lr = 0.04
learning_rate = 0.003
min_lr = 0.0
schedule = "wsd"
warmup_iters = 20
cooldown_iters = 150

eval_interval = 150
eval_iters = 60
log_interval = 10
compile = True
