# GPT-2 small on OpenWebText with nanoGPT's settings: 124 M parameters, 295 B tokens. nanoGPT reports a loss of
# about 2.85 after 4 days on 8 A100s; not yet measured here.
# torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py
# By --plan=True, a GPU of 80 GB has room for --batch_size=60 --gradient_accumulation_steps=8: the same 480 sequences in
# fewer, larger micro-batches.
out_dir = "out/gpt2"
dataset = "openwebtext"

n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024
batch_size = 12
gradient_accumulation_steps = 5 * 8  # 480 sequences, 491,520 tokens a step

max_iters = 600000
learning_rate = 6e-4
min_lr = 6e-5
warmup_iters = 2000
weight_decay = 0.1

eval_interval = 1000
eval_iters = 200
log_interval = 10
