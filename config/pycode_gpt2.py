# GPT-2's network and AdamW on the standard library, 2 to 3 minutes on 2 cores: learned positions, LayerNorm, GELU,
# biases. Not yet measured.
dataset = "pycode"
out_dir = "out/pycode_gpt2"

n_layer = 4
n_head = 4
n_embd = 192
block_size = 256
batch_size = 8
gradient_accumulation_steps = 1
bias = True

max_iters = 450
learning_rate = 1e-3
min_lr = 1e-4
beta2 = 0.99
warmup_iters = 20

eval_interval = 150
eval_iters = 60
log_interval = 10
