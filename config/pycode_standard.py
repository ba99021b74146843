# The standard block on Python's standard library, byte by byte, 2 minutes on 2 cores: what others are compared with.
# Validation loss 1.226 nats per byte, 1.77 bits, on the whole set (docs/baselines.md: mean of three seeds, bfloat16).
dataset = "pycode"
out_dir = "out/pycode_standard"

n_layer = 4
n_head = 4
n_embd = 192
block_size = 256
batch_size = 8
gradient_accumulation_steps = 1
norm = "rmsnorm"
qk_norm = True
pos = "rope"
mlp = "relu2"

optimizer = "muon"
max_iters = 450
muon_lr = 0.005
learning_rate = 0.006
min_lr = 0.0
schedule = "wsd"
warmup_iters = 20
cooldown_iters = 150

eval_interval = 150
eval_iters = 60
log_interval = 10
compile = True
