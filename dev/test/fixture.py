#!/usr/bin/env python3
"""fixture.py: the whole model in float64, as a reference for the C and CUDA code.

The model is defined here a second time, in JAX, from its formulas. JAX differentiates it by itself, so that the
gradients share nothing with the backward pass written by hand. The results are stored as small safetensors files
that a C test reads: initial parameters, data, logits, loss, every gradient, and the curve of 20 training steps.

    pip install jax numpy safetensors
    python3 dev/test/fixture.py           # checks itself, then rewrites dev/test/fixtures/*.safetensors

Before a file is written the script compares the JAX forward with an independent plain NumPy one, the
JAX gradients with finite differences of the NumPy loss, and the rotary embedding with its definition. It exits with
status 1, writing nothing, when a check fails. Repeated runs write the same bytes; another version of JAX or
another processor may change the last digits of the float64 values (about 1e-14).

Letters: B batch, T sequence, C channels, L layers, H heads, K key/value heads, D head size, F feed-forward, V
vocabulary (not padded).

What a file holds
    config      I32 [16]        family (0 gpt2, 1 llama), L, H, K, C, F, context, V, tied (0 or 1), B, T, D, biases of
                                queries, keys and values in llama (0 or 1), norms of queries and keys (0 or 1), factor
                                of RoPE's scaling as Llama 3.1 has it (0: none), context before scaling
    hyper       F64 [6]         learning rate, beta1, beta2, epsilon, weight decay, largest gradient norm
    tokens      I32 (20, B, T)  inputs; step i trains on tokens[i] and targets[i]
    targets     I32 (20, B, T)  the token to predict, or -1: no target there, the loss is the mean over the others
    param.NAME  F32             initial parameters; each value is exact in BF16 and in FP16 too
    grad.NAME   F32             gradient of the loss of step 0 at the initial parameters, before clipping
    logits      F32 (B, T, V)   of tokens[0] at the initial parameters
    loss        F64 [1]         of step 0 at the initial parameters; equal to losses[0]
    losses      F64 [20]        loss of each step, before its update
    grad_norms  F64 [20]        L2 norm of the whole gradient of each step, before clipping
    final.NAME  F32             parameters after 20 updates, for the tensors of one dimension (norms, biases)
    final_norms F64 [tensors]   L2 norm of every parameter tensor after 20 updates, in the order of param.NAME

The order of param.NAME in the file is the order of the parameter table: token_embedding, position_embedding, then for
each block norm1, qkv, q_norm, k_norm, attention_out, norm2, ffn_in, ffn_out (each weight, bias), then final_norm, head_weight; a
family leaves out what it does not have. Shapes are in parameter_shapes below.

How to compare
    Some gradients are mathematically zero, and consist only of rounding errors in another implementation: that of the
    keys' bias (softmax does not see a constant added to all scores of a row), and those of queries and keys when
    T = 1. Measure the error of a tensor against the largest value of that tensor, not entry by entry. The epsilon of
    AdamW in `hyper` is large enough that the update does not blow these errors up to the size of a step. The script
    trains in float32 too, and prints how far that is from float64: a bound for float code must be above these figures.
"""

import json
import os
import sys

# One thread: the order of summation, and so the bytes, cannot depend on the number of processors.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

jax.config.update("jax_enable_x64", True)

STEPS = 20
NORM_EPSILON = 1e-5
ROPE_THETA = 10000.0

# The usual 1e-8 for epsilon would let AdamW turn rounding errors into full-size steps: a float32 run would differ from
# the float64 one by 2e-2 in a parameter whose gradient is mathematically zero. With 1e-5 it stays within 2e-5.
HYPER = dict(beta1=0.9, beta2=0.95, epsilon=1e-5, weight_decay=0.1, clip=1.0)

# Deliberately awkward: head sizes that no vector width divides, odd sequence lengths, positions that are never used.
# gpt2_long learns fast enough that some of its last gradients are too small to be clipped; the others are clipped at
# every step.
FIXTURES = {
    "gpt2": dict(family="gpt2", L=2, H=3, K=3, C=36, F=144, context=24, V=65, tied=True, B=2, T=19,
                 lr=3e-3, seed=1),
    "llama_gqa": dict(family="llama", L=2, H=4, K=2, C=40, F=56, context=32, V=131, tied=False, B=3, T=17,
                      lr=3e-3, seed=2),
    "llama_tied": dict(family="llama", L=1, H=4, K=1, C=32, F=44, context=8, V=97, tied=True, B=5, T=1,
                       lr=3e-3, seed=3),
    "gpt2_long": dict(family="gpt2", L=1, H=2, K=2, C=32, F=128, context=160, V=50, tied=True, B=1, T=150,
                      lr=1.5e-2, seed=4),
    # The additions of Qwen2, Qwen3 and Llama 3.1, all at once: heads wider than C / H, biases, norms, scaled angles.
    "llama_relatives": dict(family="llama", L=1, H=4, K=2, C=28, F=36, context=24, V=67, tied=True, B=2, T=21,
                            lr=3e-3, seed=5, D=10, qkv_bias=True, qk_norm=True, rope_factor=4, rope_original=60),
}
for fixture in FIXTURES.values():
    absent = dict(D=fixture["C"] // fixture["H"], qkv_bias=False, qk_norm=False, rope_factor=0, rope_original=0)
    fixture.update({**absent, **fixture})

# ------------------------------------------------------------------------------------------------
# Parameters and data


def parameter_shapes(c):
    """Name -> shape of every parameter tensor, in table order. A linear layer's weight is (out, in)."""
    C, F, D, gpt2 = c["C"], c["F"], c["D"], c["family"] == "gpt2"
    ffn_in = F if gpt2 else 2 * F  # llama: rows 0 .. F-1 are the gate, F .. 2F-1 the up projection
    block = {"norm1": (C,), "qkv": ((c["H"] + 2 * c["K"]) * D, C)}
    if c["qk_norm"]:
        block.update({"q_norm": (D,), "k_norm": (D,)})
    block.update({"attention_out": (C, c["H"] * D), "norm2": (C,), "ffn_in": (ffn_in, C), "ffn_out": (C, F)})
    layers = {f"block.{l}.{name}": weight for l in range(c["L"]) for name, weight in block.items()}
    shapes = {"token_embedding": (c["V"], C)}
    if gpt2:
        shapes["position_embedding"] = (c["context"], C)
    for name, weight in {**layers, "final_norm": (C,)}.items():
        shapes[name + "_weight"] = weight
        if gpt2 or (c["qkv_bias"] and name.endswith(".qkv")):
            shapes[name + "_bias"] = weight[:1]
    if not c["tied"]:
        shapes["head_weight"] = (c["V"], C)
    return shapes


def round_to_bf16_and_fp16(x):
    """The nearest float32 with 8 significant bits, then FP16, which only cuts bits below 2^-24: exact in both types."""
    bits = x.astype(np.float32).view(np.uint32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).astype(np.float16).astype(np.float32)


def make_parameters(c, random):
    """Float32 values; large enough that no layer is nearly linear and every gradient matters."""
    def value(name, normal):
        return 0.08 * normal if normal.ndim == 2 else 0.03 * normal if name.endswith("_bias") else 1 + 0.1 * normal

    return {name: round_to_bf16_and_fp16(value(name, random.standard_normal(shape)))
            for name, shape in parameter_shapes(c).items()}


def make_data(c, random):
    """Tokens that follow a rule three times out of four, so that there is something to learn; targets with gaps."""
    B, T, V = c["B"], c["T"], c["V"]
    text = random.randint(0, V, size=(STEPS, B, T + 1))
    follows = random.random_sample(text.shape) < 0.75
    for t in range(1, T + 1):
        text[:, :, t] = np.where(follows[:, :, t], (3 * text[:, :, t - 1] + 7) % V, text[:, :, t])
    targets = text[:, :, 1:].copy()
    targets[random.random_sample(targets.shape) < 0.06] = -1
    targets[0, 0, 0] = targets[0, -1, -1] = -1
    if B > 1:
        targets[3, 1, :] = -1  # a whole sequence without a target
    assert np.all(np.sum(targets != -1, axis=(1, 2)) > 0)
    return text[:, :, :-1].astype(np.int32), targets.astype(np.int32)


# ------------------------------------------------------------------------------------------------
# The model in JAX: the oracle


def norm(x, p, name, family):
    """x (B, T, C): LayerNorm for gpt2, RMSNorm for llama."""
    if family == "gpt2":
        centred = x - x.mean(-1, keepdims=True)
        variance = (centred * centred).mean(-1, keepdims=True)
        return centred / jnp.sqrt(variance + NORM_EPSILON) * p[name + "_weight"] + p[name + "_bias"]
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + NORM_EPSILON) * p[name + "_weight"]


def linear(x, p, name):
    y = x @ p[name + "_weight"].T
    return y + p[name + "_bias"] if name + "_bias" in p else y


def rope_frequencies(D, factor, original):
    """theta^(-2i/D); with a factor, those that turn less than once over the original context are divided by it, those
    that turn more than 4 times stay, with a linear blend in between."""
    frequency = ROPE_THETA ** (-2.0 * np.arange(D // 2) / D)
    if not factor:
        return frequency
    kept = np.clip((original * frequency / (2 * np.pi) - 1) / 3, 0, 1)
    return frequency * (kept + (1 - kept) / factor)


def rope(x, first_position=0, factor=0, original=0):
    """x (B, T, heads, D): channels i and i + D/2 turn together by position * frequency."""
    T, D = x.shape[1], x.shape[3]
    frequency = rope_frequencies(D, factor, original)
    angle = (first_position + np.arange(T))[:, None] * frequency[None, :]
    angle = np.concatenate([angle, angle], axis=1)[None, :, None, :]  # (1, T, 1, D)
    half_turned = jnp.concatenate([-x[..., D // 2:], x[..., :D // 2]], axis=-1)
    return x * np.cos(angle).astype(x.dtype) + half_turned * np.sin(angle).astype(x.dtype)


def attention(qkv, p, block, c):
    """qkv (B, T, (H + 2K) D) -> (B, T, H D); query head h reads key/value head h / (H / K)."""
    B, T, _ = qkv.shape
    H, K, D = c["H"], c["K"], c["D"]
    q = qkv[..., :H * D].reshape(B, T, H, D)
    k = qkv[..., H * D:(H + K) * D].reshape(B, T, K, D)
    v = qkv[..., (H + K) * D:].reshape(B, T, K, D)
    if c["qk_norm"]:
        q, k = norm(q, p, block + "q_norm", "llama"), norm(k, p, block + "k_norm", "llama")
    if c["family"] == "llama":
        q, k = (rope(x, 0, c["rope_factor"], c["rope_original"]) for x in (q, k))
    k = jnp.repeat(k, H // K, axis=2)
    v = jnp.repeat(v, H // K, axis=2)
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / np.asarray(np.sqrt(D), q.dtype)
    scores = jnp.where(np.tril(np.ones((T, T), bool)), scores, -jnp.inf)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, axis=-1), v).reshape(B, T, H * D)


def feed_forward(h, p, block, c):
    h = linear(h, p, block + "ffn_in")
    if c["family"] == "gpt2":
        h = 0.5 * h * (1 + jnp.tanh(float(np.sqrt(2 / np.pi)) * (h + 0.044715 * h * h * h)))
    else:
        gate, up = h[..., :c["F"]], h[..., c["F"]:]
        h = gate / (1 + jnp.exp(-gate)) * up
    return linear(h, p, block + "ffn_out")


def model_logits(p, tokens, c):
    """tokens (B, T) -> (B, T, V), in the type of the parameters."""
    x = p["token_embedding"][tokens]
    if c["family"] == "gpt2":
        x = x + p["position_embedding"][:tokens.shape[1]]
    for l in range(c["L"]):
        block = f"block.{l}."
        h = norm(x, p, block + "norm1", c["family"])
        x = x + linear(attention(linear(h, p, block + "qkv"), p, block, c), p, block + "attention_out")
        x = x + feed_forward(norm(x, p, block + "norm2", c["family"]), p, block, c)
    x = norm(x, p, "final_norm", c["family"])
    return x @ (p["token_embedding"] if c["tied"] else p["head_weight"]).T


def model_loss(p, tokens, targets, c):
    log_probability = jax.nn.log_softmax(model_logits(p, tokens, c), axis=-1)
    chosen = jnp.take_along_axis(log_probability, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    counts = targets != -1
    return -jnp.where(counts, chosen, 0).sum() / counts.sum().astype(chosen.dtype)


# ------------------------------------------------------------------------------------------------
# Training: AdamW ("Decoupled Weight Decay Regularization", Loshchilov and Hutter) after clipping by the global norm


def train(initial, tokens, targets, c, hyper, dtype):
    """The whole curve in one type: (losses, gradient norms, gradient of step 0, parameters after the last step)."""
    loss_and_gradient = jax.jit(jax.value_and_grad(lambda p, x, y: model_loss(p, x, y, c)))
    lr, beta1, beta2 = hyper["lr"], hyper["beta1"], hyper["beta2"]
    p = {name: value.astype(dtype) for name, value in initial.items()}
    m = {name: np.zeros_like(value) for name, value in p.items()}
    v = {name: np.zeros_like(value) for name, value in p.items()}
    losses, norms, first_gradient = [], [], None
    for step in range(STEPS):
        loss, gradient = loss_and_gradient(p, tokens[step], targets[step])
        gradient = {name: np.asarray(value) for name, value in gradient.items()}
        first_gradient = first_gradient or gradient
        losses.append(float(loss))
        norms.append(float(np.sqrt(sum(np.sum(g.astype(np.float64) ** 2) for g in gradient.values()))))
        scale = min(1.0, hyper["clip"] / norms[-1])
        for name in p:
            g = gradient[name] * scale
            m[name] = beta1 * m[name] + (1 - beta1) * g
            v[name] = beta2 * v[name] + (1 - beta2) * g * g
            second = np.sqrt(v[name] / (1 - beta2 ** (step + 1)))
            update = (m[name] / (1 - beta1 ** (step + 1))) / (second + hyper["epsilon"])
            decay = hyper["weight_decay"] if p[name].ndim == 2 else 0.0
            p[name] = p[name] - lr * (update + decay * p[name])
            assert loss.dtype == g.dtype == p[name].dtype == dtype
    return np.array(losses), np.array(norms), first_gradient, p


# ------------------------------------------------------------------------------------------------
# The model in NumPy: a second opinion, position by position and head by head, sharing no code with the above


def numpy_norm(x, p, name, family):
    rows = []
    for row in x:
        if family == "gpt2":
            rows.append((row - np.mean(row)) / np.sqrt(np.var(row) + NORM_EPSILON))
        else:
            rows.append(row * (np.dot(row, row) / len(row) + NORM_EPSILON) ** -0.5)
    return np.array(rows) * p[name + "_weight"] + p.get(name + "_bias", 0.0)


def numpy_linear(x, p, name):
    return np.einsum("ti,oi->to", x, p[name + "_weight"]) + p.get(name + "_bias", 0.0)


def numpy_wavelength(i, half, c):
    """Positions in a whole turn of pair i, over 2 pi, scaled as the code that Llama 3.1 was published with."""
    length = ROPE_THETA ** (2 * i / (2 * half))
    if c["rope_factor"] == 0 or 2 * np.pi * length < c["rope_original"] / 4:
        return length
    if 2 * np.pi * length > c["rope_original"]:
        return length * c["rope_factor"]
    smooth = (c["rope_original"] / (2 * np.pi * length) - 1) / (4 - 1)
    return 1 / ((1 - smooth) / length / c["rope_factor"] + smooth / length)


def numpy_rotate(vector, position, c):
    """The D channels as D/2 complex numbers x_i + j x_(i + D/2), each times exp(j angle)."""
    half = len(vector) // 2
    z = vector[:half] + 1j * vector[half:]
    z = z * np.array([np.exp(1j * position / numpy_wavelength(i, half, c)) for i in range(half)])
    return np.concatenate([z.real, z.imag])


def numpy_attention(qkv, p, block, c):
    H, K, D = c["H"], c["K"], c["D"]
    out = np.zeros((len(qkv), H * D))
    for h in range(H):
        shared = h // (H // K)
        q = qkv[:, h * D:(h + 1) * D]
        k = qkv[:, (H + shared) * D:(H + shared + 1) * D]
        v = qkv[:, (H + K + shared) * D:(H + K + shared + 1) * D]
        if c["qk_norm"]:
            q, k = numpy_norm(q, p, block + "q_norm", "llama"), numpy_norm(k, p, block + "k_norm", "llama")
        if c["family"] == "llama":
            q = np.array([numpy_rotate(row, t, c) for t, row in enumerate(q)])
            k = np.array([numpy_rotate(row, t, c) for t, row in enumerate(k)])
        for t in range(len(qkv)):
            weight = np.exp(k[:t + 1] @ q[t] / D ** 0.5)
            out[t, h * D:(h + 1) * D] = weight @ v[:t + 1] / weight.sum()
    return out


def numpy_logits(p, tokens, c):
    """tokens (B, T) -> (B, T, V) in float64, one sequence after the other."""
    sequences = []
    for sequence in tokens:
        x = np.array([p["token_embedding"][token] for token in sequence])
        if c["family"] == "gpt2":
            x += np.array([p["position_embedding"][t] for t in range(len(sequence))])
        for l in range(c["L"]):
            block = f"block.{l}."
            qkv = numpy_linear(numpy_norm(x, p, block + "norm1", c["family"]), p, block + "qkv")
            x = x + numpy_linear(numpy_attention(qkv, p, block, c), p, block + "attention_out")
            h = numpy_linear(numpy_norm(x, p, block + "norm2", c["family"]), p, block + "ffn_in")
            if c["family"] == "gpt2":
                # 0.5 (1 + tanh(u)) = 1 / (1 + exp(-2u))
                h = h / (1 + np.exp(-2 * (2 / np.pi) ** 0.5 * (h + 0.044715 * h ** 3)))
            else:
                gate, up = np.split(h, 2, axis=1)
                h = up * gate * 0.5 * (1 + np.tanh(gate / 2))
            x = x + numpy_linear(h, p, block + "ffn_out")
        head = p["token_embedding"] if c["tied"] else p["head_weight"]
        sequences.append(np.einsum("tc,vc->tv", numpy_norm(x, p, "final_norm", c["family"]), head))
    return np.array(sequences)


def numpy_loss(p, tokens, targets, c):
    logits = numpy_logits(p, tokens, c)
    losses = [np.log(np.sum(np.exp(row))) - row[target]
              for row, target in zip(logits.reshape(-1, c["V"]), targets.reshape(-1)) if target != -1]
    return sum(losses) / len(losses)


# ------------------------------------------------------------------------------------------------
# Checks

passed = failed = 0


def check(what, error, bound):
    """One line per check; NaN fails."""
    global passed, failed
    good = bool(error <= bound)
    passed, failed = passed + good, failed + (not good)
    print(f"  {'ok  ' if good else 'FAIL'} {what:64s} {error:.1e} <= {bound:.0e}")


def relative(a, b):
    return np.max(np.abs(a - b) / np.abs(b))


def of_largest(a, b):
    """Over tensors by name: the largest difference in a tensor, as a share of its largest value."""
    return np.max([np.max(np.abs(a[name] - b[name])) / np.max(np.abs(b[name])) for name in b])


def check_rope():
    """Against the definition: which channels form a pair, which way they turn, and that only distances matter."""
    print("rope")
    random = np.random.RandomState(0)
    D = 10
    unit = np.zeros((1, 1, 1, D))
    unit[..., 1] = 1
    angle = 3 * ROPE_THETA ** (-2 / D)
    expected = np.zeros(D)
    expected[1], expected[1 + D // 2] = np.cos(angle), np.sin(angle)
    turned = np.asarray(rope(unit, 3)[0, 0, 0])
    check("channel 1 at position 3 turns into channel 1 + D/2", np.max(np.abs(turned - expected)), 1e-15)
    q, k = random.standard_normal((2, 1, 1, 1, D))
    products = np.array([[float(jnp.sum(rope(q, s + distance) * rope(k, s))) for s in range(0, 40, 8)]
                         for distance in range(4)])
    check("q . k is the same for equal distances", np.max(np.ptp(products, axis=1)), 1e-13)
    check("q . k differs between distances (1 / spread)", 1 / np.min(np.abs(np.diff(products[:, 0]))), 1e2)


def check_gradients(p, gradient, tokens, targets, c, random):
    """Five-point differences of the NumPy loss: four entries of every tensor, and one direction through all entries.

    With a step of 2e-4 rounding (1e-15 / 2e-4) and the neglected fifth derivative both stay near 1e-11.
    """
    step = 2e-4
    worst_entry, worst_direction = 0.0, 0.0

    def derivative(name, direction):
        values = [numpy_loss({**p, name: p[name] + offset * step * direction}, tokens, targets, c)
                  for offset in (-2, -1, 1, 2)]
        return (values[0] - 8 * values[1] + 8 * values[2] - values[3]) / (12 * step)

    for name, g in gradient.items():
        for index in [int(np.argmax(np.abs(g)))] + list(random.randint(0, g.size, size=3)):
            direction = np.zeros(g.size)
            direction[index] = 1
            error = abs(derivative(name, direction.reshape(g.shape)) - g.flat[index]) / np.max(np.abs(g))
            worst_entry = np.maximum(worst_entry, error)
        direction = random.standard_normal(g.shape)
        direction /= np.linalg.norm(direction)
        error = abs(derivative(name, direction) - np.sum(g * direction)) / np.linalg.norm(g)
        worst_direction = np.maximum(worst_direction, error)
    check(f"gradients: entries of {len(gradient)} tensors against differences", worst_entry, 1e-7)
    check("gradients: a direction through each whole tensor", worst_direction, 1e-7)


# ------------------------------------------------------------------------------------------------
# Files


def write_safetensors(path, tensors):
    """8 bytes header length, JSON header padded with spaces to a multiple of 8, then the data in the order given.

    The caller puts 8-byte types first, so that every tensor lies on a multiple of its element size.
    """
    types = {"float64": "F64", "float32": "F32", "int32": "I32"}
    header, offset = {}, 0
    for name, value in tensors.items():
        assert offset % value.itemsize == 0
        header[name] = {"dtype": types[value.dtype.name], "shape": list(value.shape),
                        "data_offsets": [offset, offset + value.nbytes]}
        offset += value.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path + ".tmp", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for value in tensors.values():
            file.write(np.ascontiguousarray(value).tobytes())
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".tmp", path)


def make_fixture(c):
    """The contents of the file, checked."""
    random = np.random.RandomState(c["seed"])  # this generator's numbers never change, whatever NumPy's version
    parameters = make_parameters(c, random)
    tokens, targets = make_data(c, random)
    p = {name: value.astype(np.float64) for name, value in parameters.items()}

    bits = [value.view(np.uint32) for value in parameters.values()]
    check("parameters exact in BF16 and FP16 (number that are not)",
          sum(np.count_nonzero(b & 0xFFFF) for b in bits)
          + sum(np.count_nonzero(v.astype(np.float16).astype(np.float32) != v) for v in parameters.values()), 0)

    hyper = dict(lr=c["lr"], **HYPER)
    losses, norms, gradient, final = train(parameters, tokens, targets, c, hyper, np.float64)
    logits = np.asarray(jax.jit(lambda q: model_logits(q, tokens[0], c))(p))
    check("logits: JAX against NumPy", np.max(np.abs(logits - numpy_logits(p, tokens[0], c))), 1e-12)
    check("loss: JAX against NumPy", abs(losses[0] - numpy_loss(p, tokens[0], targets[0], c)), 1e-12)
    check("loss after training: JAX against NumPy",
          abs(float(model_loss(final, tokens[0], targets[0], c)) - numpy_loss(final, tokens[0], targets[0], c)), 1e-12)
    check_gradients(p, gradient, tokens[0], targets[0], c, random)

    # The same curve in float32: what an implementation in float can be expected to reproduce.
    losses32, norms32, gradient32, final32 = train(parameters, tokens, targets, c, hyper, np.float32)
    check("float32: losses of 20 steps", relative(losses32, losses), 1e-6)
    check("float32: gradient norms of 20 steps", relative(norms32, norms), 2e-6)
    check("float32: gradients of step 0, of each tensor's largest", of_largest(gradient32, gradient), 2e-6)
    check("float32: final parameters, of each tensor's largest", of_largest(final32, final), 5e-5)
    final_norms = np.array([np.linalg.norm(value) for value in final.values()])
    check("float32: norms of the final parameters",
          relative(np.array([np.linalg.norm(value.astype(np.float64)) for value in final32.values()]), final_norms),
          5e-6)
    print(f"       loss {losses[0]:.4f} -> {losses[-1]:.4f}, gradient norm {norms.min():.3f} .. {norms.max():.3f}, "
          f"{np.count_nonzero(norms > HYPER['clip'])} of {STEPS} steps clipped, "
          f"{sum(value.size for value in parameters.values())} parameters")

    config = [int(c["family"] == "llama")] + [c[k] for k in ("L", "H", "K", "C", "F", "context", "V")]
    config += [int(c[k]) for k in ("tied", "B", "T", "D", "qkv_bias", "qk_norm", "rope_factor", "rope_original")]
    tensors = {"hyper": np.array(list(hyper.values())), "loss": losses[:1], "losses": losses, "grad_norms": norms,
               "final_norms": final_norms, "config": np.array(config, np.int32), "tokens": tokens, "targets": targets,
               "logits": logits.astype(np.float32)}
    tensors.update({"param." + name: value for name, value in parameters.items()})
    tensors.update({"grad." + name: gradient[name].astype(np.float32) for name in parameters})
    tensors.update({"final." + name: final[name].astype(np.float32) for name in parameters if final[name].ndim == 1})
    return tensors


def main():
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fixtures")
    os.makedirs(folder, exist_ok=True)
    check_rope()
    made = {}
    for name, c in FIXTURES.items():
        print(name + "  " + " ".join(f"{key}={value}" for key, value in c.items()))
        made[name] = make_fixture(c)
    if failed == 0:
        print("files")
        for name, tensors in made.items():
            path = os.path.join(folder, name + ".safetensors")
            write_safetensors(path, tensors)
            read = load_file(path)
            differ = sum(key not in read or read[key].dtype != value.dtype or not np.array_equal(read[key], value)
                         for key, value in tensors.items()) + len(set(read) - set(tensors))
            check(f"{name}.safetensors, {os.path.getsize(path)} bytes: tensors that differ when read", differ, 0)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
