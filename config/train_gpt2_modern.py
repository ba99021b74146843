# GPT-2 small's size, data and batch with later inventions: RoPE, RMSNorm, normed q and k, squared ReLU, Muon, a
# constant learning rate with a linear decay at the end, and what docs/superblock.md found: a short convolution helps,
# and beside it one sum per layer costs nothing. 124 M parameters, 9.8 B tokens. Not yet measured.
# torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2_modern.py
out_dir = "out/gpt2_modern"
dataset = "openwebtext"

n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024
batch_size = 12
gradient_accumulation_steps = 5 * 8  # 480 sequences, 491,520 tokens a step
norm = "rmsnorm"
qk_norm = True
pos = "rope"
mlp = "relu2"
block = "superblock"
conv = 4

optimizer = "muon"
max_iters = 20000
learning_rate = 3e-3
conv_lr = 0.015  # five times the learning rate, as in config/train_pycode.py
min_lr = 0.0
schedule = "wsd"
warmup_iters = 250
cooldown_iters = 6000

eval_interval = 1000
eval_iters = 200
log_interval = 10
