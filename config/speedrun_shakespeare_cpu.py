# The loss of nanoGPT's laptop run (1.8857 after 2000 steps, by its own 20 batches) in the least time on 2 cores: 0.76 M
# parameters, the same context and data, one sum per layer with a convolution. Validation loss 1.844 to 1.875 on the
# whole set with --seed=1 to 5, 10 to 14 seconds each (2026-11-27, 2 cores of an AMD EPYC without GPU, in bfloat16).
# docs/performance.md says what was tried.
# python data/shakespeare_char/prepare.py && python train.py config/speedrun_shakespeare_cpu.py
out_dir = "out/speedrun_shakespeare_cpu"
dataset = "shakespeare_char"

n_layer = 2  # two wide layers take three quarters of the time of four with as many parameters, and learn as fast
n_head = 4
n_embd = 176
block_size = 64
batch_size = 16
gradient_accumulation_steps = 1
norm = "rmsnorm"
qk_norm = True
pos = "rope"
block = "superblock"
conv = 4
mlp = "relu2"

optimizer = "muon"
muon_momentum = 0.75  # with 0.95, a run of 200 steps is half over before the average is of its own gradients
max_iters = 105
learning_rate = 6e-3
conv_lr = 0.06  # with that of embeddings, the taps, which begin at 0, have hardly grown at the end
min_lr = 0.0
schedule = "wsd"
warmup_iters = 10
cooldown_iters = 75

eval_interval = 0  # only at the end
eval_iters = 0  # the whole validation set
log_interval = 20
