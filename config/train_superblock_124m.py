# config/train_gpt2.py with superblocks and no other change: the same number of parameters less one norm per layer, so
# that the two losses can be compared. Not yet measured.
# torchrun --standalone --nproc_per_node=8 train.py config/train_superblock_124m.py
out_dir = "out/superblock_124m"
dataset = "openwebtext"

n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024
batch_size = 12
gradient_accumulation_steps = 5 * 8  # 480 sequences, 491,520 tokens a step
block = "superblock"

max_iters = 600000
learning_rate = 6e-4
min_lr = 6e-5
warmup_iters = 2000
weight_decay = 0.1

eval_interval = 1000
eval_iters = 200
log_interval = 10
