# 100 steps of each optimizer by another program's arithmetic, for dev/test/test_optimizers.c:
#
#   adamw-8bit           bitsandbytes' in NumPy: its map, its update (CPU backend), the nearest number of the map. Where
#                        the package is installed it is run, too: its maps must have the same bits, and its update,
#                        with this quantizer, the same weights (its CPU library finds codes through a coarser table)
#   adamw-bf16           ours in NumPy, with our random numbers
#   adafactor            torch.optim.Adafactor in float64, eps (1e-30, 0.001)
#   came, adam-mini, sm3 NumPy in float64, from the papers
#
#   python3 dev/peers/optimizers.py          compares them with dev/test/fixtures/optimizers.f32
#   python3 dev/peers/optimizers.py --write  makes it: float32, the weights of each after 100 steps, then both maps
#
# pip install numpy torch bitsandbytes. Says "skipped" without them. Weights and gradients are uniform random numbers
# of Philox (llmtrain/ops/base.h), so both programs have them without a file.
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path = [p for p in sys.path if os.path.abspath(p or ".") != HERE]
try:
    import numpy as np
    import torch
except ImportError as missing:
    print("skipped: %s" % missing)
    sys.exit(0)

f32, f64 = np.float32, np.float64
FIXTURE = os.path.join(HERE, "..", "test", "fixtures", "optimizers.f32")
STEPS, LR, BETA1, BETA2, EPSILON, DECAY, SCALE = 100, f32(0.01), f32(0.9), f32(0.95), f32(1e-8), f32(0.1), f32(0.5)
# Rows, columns (0: a vector), rows of queries and keys, head size, position in the flat vector.
TENSORS = [(48, 40, 32, 8, 0), (37, 24, 0, 0, 1920), (300, 0, 0, 0, 2816)]
TEST, ROUNDING_OF_STATES, BLOCK = 7, 9, 256


def philox(seed, purpose, step, first, n):
    index = np.arange(first // 4, (first + n + 3) // 4, dtype=np.uint64)
    low = np.uint64(0xFFFFFFFF)
    c0, c1 = index & low, index >> np.uint64(32)
    c2, c3 = np.full_like(index, step), np.full_like(index, purpose)
    k0, k1 = seed, 0
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = ((p1 >> np.uint64(32)) ^ c1 ^ np.uint64(k0), p1 & low,
                          (p0 >> np.uint64(32)) ^ c3 ^ np.uint64(k1), p0 & low)
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], 1).reshape(-1)[first % 4:][:n].astype(np.uint32)


def uniform(step, first, n):
    return (philox(1, TEST, step, first, n) >> np.uint32(8)).astype(f32) * f32(2.0 ** -24)


def size(tensor):
    return tensor[0] * max(tensor[1], 1)


def shaped(x, tensor):
    return x.reshape(tensor[0], tensor[1]) if tensor[1] else x


def start(tensor):
    return shaped((uniform(0, tensor[4], size(tensor)) - f32(0.5)) * f32(0.25), tensor)


# With sizes that differ by element, and a mean; a matrix' fourth row never has a gradient.
def gradient(step, tensor):
    n = size(tensor)
    scale = f32(0.5) ** (np.arange(n) % 5).astype(f32)
    g = shaped((uniform(step, tensor[4], n) - f32(0.4375)) * scale, tensor)
    if tensor[1]:
        g[3] = 0
    return g


def decay(tensor):
    return float(DECAY) if tensor[1] else 0.0


def fma(a, b, c):
    return (np.asarray(a, f64) * np.asarray(b, f64) + np.asarray(c, f64)).astype(f32)


# ---- AdamW with narrow states

def dynamic_map(signed):
    numbers = [f32(0), f32(1)]
    for i in range(7):
        n = 2 ** i * (1 if signed else 2)
        step = (f32(1) - f32(0.1)) / f32(n)
        ends = [f32(f64(f32(0.1)) + f64(step) * k) if k < (n + 1) // 2 else f32(1 - f64(step) * (n - k))
                for k in range(n + 1)]
        for k in range(n):
            number = f32(10.0 ** (i - 6)) * ((ends[k] + ends[k + 1]) / f32(2))
            numbers += [number, -number] if signed else [number]
    return np.sort(np.array(numbers, f32))


def middles(numbers):
    return (numbers[:-1] + numbers[1:]) * f32(0.5)


# The nearest number; at a midpoint the one nearer to 0.
def quantize(x, numbers):
    blocks = [x[i:i + BLOCK] for i in range(0, len(x), BLOCK)]
    scales = np.array([np.abs(b).max() for b in blocks], f32)
    x = np.concatenate([b * (f32(1) / s if s >= np.finfo(f32).tiny else f32(0)) for b, s in zip(blocks, scales)])
    codes = np.searchsorted(middles(numbers), x, side="left")
    negative = np.searchsorted(middles(numbers), x, side="right")
    return np.where(x < 0, negative, codes).astype(np.uint8), scales


def dequantize(codes, scales, numbers):
    return numbers[codes] * np.repeat(scales, BLOCK)[:len(codes)]


def adamw_8bit(tensor):
    maps = dynamic_map(True), dynamic_map(False)
    w = start(tensor).reshape(-1).copy()
    states = [(np.zeros(len(w), np.uint8), np.zeros(-(-len(w) // BLOCK), f32)) for _ in maps]
    for t in range(1, STEPS + 1):
        g = gradient(t, tensor).reshape(-1) * SCALE
        m, v = (dequantize(*s, numbers) for s, numbers in zip(states, maps))
        m = m * BETA1 + (f32(1) - BETA1) * g
        v = v * BETA2 + (f32(1) - BETA2) * g * g
        correction1, correction2 = 1.0 - float(BETA1) ** t, np.sqrt(1.0 - float(BETA2) ** t)
        w = w * f32(1.0 - float(LR) * decay(tensor))
        w = w + f32(-float(LR) / correction1) * (m / (np.sqrt(v) / f32(correction2) + EPSILON))
        states = [quantize(x, numbers) for x, numbers in zip((m, v), maps)]
    return w


def bitsandbytes_8bit(tensor):
    import bitsandbytes.backends.cpu.ops as ops
    from bitsandbytes.functional import create_dynamic_map
    from bitsandbytes.optim import AdamW8bit

    def exact(x, code, scale_out, codes_out, blocksize):
        codes, scales = quantize(x.numpy().reshape(-1), code.numpy())
        codes_out.copy_(torch.from_numpy(codes).reshape(codes_out.shape))
        scale_out.copy_(torch.from_numpy(scales))
    ops._quant_blockwise_fp32_direct = exact
    for signed in (True, False):
        if (create_dynamic_map(signed).numpy() != dynamic_map(signed)).any():
            raise SystemExit("the maps of bitsandbytes differ")
    w = torch.nn.Parameter(torch.from_numpy(start(tensor).copy()))
    optimizer = AdamW8bit([w], lr=float(LR), betas=(float(BETA1), float(BETA2)), eps=float(EPSILON),
                          weight_decay=decay(tensor), min_8bit_size=1)
    for t in range(1, STEPS + 1):
        w.grad = torch.from_numpy(gradient(t, tensor) * SCALE)
        optimizer.step()
    return w.detach().numpy().reshape(-1)


def stochastic_bf16(x, random):
    return ((x.view(np.uint32) + (random & np.uint32(0xFFFF))) & np.uint32(0xFFFF0000)).view(f32)


def adamw_bf16(tensor):
    w = start(tensor).reshape(-1).copy()
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t in range(1, STEPS + 1):
        g = gradient(t, tensor).reshape(-1) * SCALE
        m = fma(f32(1) - BETA1, g - m, m)
        v = fma(f32(1) - BETA2, fma(g, g, -v), v)
        corrected = v * f32(1 / (1 - float(BETA2) ** t))
        step = m * f32(1 / (1 - float(BETA1) ** t)) / (np.sqrt(corrected) + EPSILON)
        w = fma(-LR, fma(f32(decay(tensor)), w, step), w)
        random = philox(1, ROUNDING_OF_STATES, t, tensor[4], len(w))
        m, v = stochastic_bf16(m, random), stochastic_bf16(v, random >> np.uint32(16))
    return w


# ---- Factored states

def adafactor(tensor):
    w = torch.nn.Parameter(torch.from_numpy(start(tensor).astype(f64)))
    optimizer = torch.optim.Adafactor([w], lr=float(LR), eps=(1e-30, 1e-3), weight_decay=decay(tensor))
    for t in range(1, STEPS + 1):
        w.grad = torch.from_numpy((gradient(t, tensor) * SCALE).astype(f64))
        optimizer.step()
    return w.detach().numpy().reshape(-1)


def rms(x):
    return np.sqrt(np.mean(x * x))


def came(tensor):
    w, m, v = start(tensor).astype(f64), 0.0, None
    beta1, beta2, beta3 = float(BETA1), float(BETA2), 0.9999

    def averaged(states, x, beta):
        means = [x.mean(1), x.mean(0)] if tensor[1] else [x]
        return [(1 - beta) * a + beta * (s if states else 0.0) for a, s in zip(means, states or means)]

    def root(states):
        return 1 / np.sqrt(np.outer(states[0], states[1]) / states[0].mean() if tensor[1] else states[0])
    r = None
    for t in range(1, STEPS + 1):
        g = (gradient(t, tensor) * SCALE).astype(f64)
        v = averaged(v, g * g + 1e-30, beta2)
        u = g * root(v)
        u = u / max(1.0, rms(u))
        m = beta1 * m + (1 - beta1) * u
        r = averaged(r, (u - m) ** 2 + 1e-16, beta3)
        w = w - float(LR) * decay(tensor) * w
        w = w - float(LR) * (m * root(r) if tensor[1] else m)
    return w.reshape(-1)


def adam_mini(tensor):
    w, m, v = start(tensor).astype(f64), 0.0, 0.0
    beta1, beta2 = float(BETA1), float(BETA2)
    for t in range(1, STEPS + 1):
        g = (gradient(t, tensor) * SCALE).astype(f64)
        squares = (g * g).mean(1) if tensor[1] else (g * g).mean(keepdims=True)
        heads = tensor[2] // tensor[3] if tensor[3] else 0
        if heads:
            squares[:tensor[2]] = np.repeat(squares[:tensor[2]].reshape(heads, -1).mean(1), tensor[3])
        v = beta2 * v + (1 - beta2) * squares
        m = beta1 * m + (1 - beta1) * g
        divisor = np.sqrt(v / (1 - beta2 ** t)) + float(EPSILON)
        step = m / (1 - beta1 ** t) / (divisor[:, None] if tensor[1] else divisor)
        w = w - float(LR) * (step + decay(tensor) * w)
    return w.reshape(-1)


def sm3(tensor):
    w, m = start(tensor).astype(f64), 0.0
    rows, columns = np.zeros(tensor[0]), np.zeros(tensor[1] or tensor[0])
    for t in range(1, STEPS + 1):
        g = (gradient(t, tensor) * SCALE).astype(f64)
        n = (np.minimum(rows[:, None], columns[None]) if tensor[1] else columns) + g * g
        rows, columns = (n.max(1), n.max(0)) if tensor[1] else (rows, n)
        u = np.divide(g, np.sqrt(n), out=np.zeros_like(g), where=n > 0)
        m = float(BETA1) * m + (1 - float(BETA1)) * u
        w = w - float(LR) * (m + decay(tensor) * w)
    return w.reshape(-1)


METHODS = [adamw_8bit, adamw_bf16, adafactor, came, adam_mini, sm3]


def main():
    made = [np.concatenate([method(t) for t in TENSORS]).astype(f32) for method in METHODS]
    wrong = 0
    try:
        package = np.concatenate([bitsandbytes_8bit(t) for t in TENSORS])
        off = np.abs(package - made[0])
        good = np.mean(off > 1e-5) < 0.01 and off.max() < 0.1 * float(LR)
        print("%s bitsandbytes %s: maps have the same bits; weights after %d steps differ by %.1e at most, %.3f%% of "
              "them by more than 1e-5" % ("ok    " if good else "FAILED", __import__("bitsandbytes").__version__, STEPS,
                                          off.max(), 100 * np.mean(off > 1e-5)))
        wrong += not good
    except ImportError as missing:
        print("skipped bitsandbytes: %s" % missing)
    data = np.concatenate(made + [dynamic_map(True), dynamic_map(False)]).astype("<f4")
    if "--write" in sys.argv[1:]:
        data.tofile(FIXTURE)
        print("%s: %d bytes" % (os.path.relpath(FIXTURE), data.nbytes))
    else:
        same = np.abs(np.fromfile(FIXTURE, "<f4") - data)
        print("%s the fixture is what this makes, to %.1e" % ("ok    " if same.max() < 1e-5 else "FAILED", same.max()))
        wrong += not same.max() < 1e-5
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
