# T5 1.1's network and objective (arXiv:1910.10683, 2002.05202) with pycode_standard.py's optimizer, 2 to 3 minutes on 2
# cores: an encoder, and a decoder that writes the missing spans; RMSNorm, GEGLU, no biases, head not tied. RoPE
# replaces T5's learned position bias. The encoder needs many steps to learn to collect the context of each blank, and
# before this the decoder gains nothing from it. So the task of this quick run is easier: windows of 64 bytes, 3 blanks
# in each that hide 30 %, and every other layer sees only 6 bytes far.
# Validation loss 1.672 nats per missing byte or sentinel (docs/baselines.md).
dataset = "pycode"
out_dir = "out/pycode_t5"

n_layer = 2
n_encoder_layer = 4
n_head = 4
n_embd = 192
block_size = 64
batch_size = 32
gradient_accumulation_steps = 1
objective = "seq2seq"
corrupt_ratio = 0.3
span_length = 6.0
norm = "rmsnorm"
qk_norm = True
window = 6
window_pattern = "SL"
pos = "rope"
mlp = "geglu"
tie_weights = False

optimizer = "muon"
max_iters = 450
muon_lr = 0.005
learning_rate = 0.012
min_lr = 0.0
schedule = "wsd"
warmup_iters = 20
cooldown_iters = 150

eval_interval = 150
eval_iters = 60
log_interval = 10
compile = True
