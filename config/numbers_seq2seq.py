# Translates English words for numbers into German ones: the original Transformer (arXiv:1706.03762) on pairs, in 3
# minutes on 2 cores. An encoder and a decoder with one vocabulary, of bytes, sinusoidal positions, ReLU, and label
# smoothing; the norms stand before attention and MLP, and the optimizer is Muon, as in train_pycode.py.
dataset = "numbers"
out_dir = "out/numbers_seq2seq"

n_layer = 2
n_head = 4
n_embd = 128
block_size = 128
batch_size = 16
gradient_accumulation_steps = 1
objective = "seq2seq"
pos = "sinusoidal"
mlp = "relu"
label_smoothing = 0.1

optimizer = "muon"
max_iters = 400
muon_lr = 0.01
learning_rate = 0.003
min_lr = 0.0
schedule = "wsd"
warmup_iters = 30
cooldown_iters = 150

eval_interval = 100
eval_iters = 20
log_interval = 10
