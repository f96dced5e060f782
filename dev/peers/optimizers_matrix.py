#!/usr/bin/env python3
"""optimizers_matrix.py: Muon, GaLore and LDAdam in float64, written from their papers, as an oracle for the C code.

    python3 dev/peers/optimizers_matrix.py          # rewrites dev/test/fixtures/optimizers_matrix.safetensors

100 updates of a small tensor by each method: NumPy's SVD where the papers say SVD, its QR where they say QR. With
PyTorch Muon is compared with torch.optim.Muon, too, computing in float64 as this does and in bfloat16 as it ships.

The file holds KIND.SHAPE.start (F32), the weights before, and KIND.SHAPE.final (F64), those after; `spectrum` (F32), a
matrix, and `spectrum.basis` (F64), its 3 leading left singular vectors, one a row. Gradients are not stored: they are
those of gradient() below, which dev/test/test_optimizers_matrix.c computes to the same bits.
"""

import json
import math
import os

import numpy as np

STEPS, LR, DECAY, BETA1, BETA2, EPSILON, RANK = 100, 0.01, 0.1, 0.9, 0.95, 1e-8, 3
REFRESH = 200
# GaLore finds a new subspace in update 201: the 100 updates are numbers 1 to 50 and 171 to 220.
UPDATES = list(range(1, 51)) + list(range(171, 221))
SHAPES = {"wide": [(12, 20)], "tall": [(24, 10)], "stacked": [(12, 16), (6, 16), (6, 16)]}


def uniform(first, n):
    """Numbers between -1 and 1 with 23 bits, by a multiplicative hash of first, first + 1, ..."""
    x = (np.arange(first, first + n, dtype=np.uint64) * 2654435761) & 0xFFFFFFFF
    for shift, factor in ((15, 2246822519), (13, 3266489917)):
        x = ((x ^ (x >> np.uint64(shift))) * factor) & 0xFFFFFFFF
    return (x >> np.uint64(8)).astype(np.float64) * 2.0**-23 - 1.0


def gradient(update, first, rows, cols, falls):
    """Of a matrix whose elements begin at `first`; falls: singular values fall by about 4 from one to the next."""
    g = uniform(update * 100003 + first, rows * cols).reshape(rows, cols)
    if falls:
        side = 4.0 ** -np.arange(min(rows, cols))
        g = g * (side[:, None] if rows <= cols else side[None, :])
    return g


class Muon:
    def __init__(self, w):
        self.w, self.m = w, np.zeros_like(w)

    def step(self, g, t):
        self.m = 0.95 * self.m + 0.05 * g
        x = 0.95 * self.m + 0.05 * g
        tall = x.shape[0] > x.shape[1]
        x = x.T if tall else x
        x = x / (np.linalg.norm(x) + 1e-7)
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        x = x.T if tall else x
        self.w = self.w - LR * (0.2 * math.sqrt(max(x.shape)) * x + DECAY * self.w)


def adam(self, g, t):
    self.m = BETA1 * self.m + (1 - BETA1) * g
    self.v = BETA2 * self.v + (1 - BETA2) * g * g
    return self.m / (1 - BETA1**t) / (np.sqrt(self.v / (1 - BETA2**t)) + EPSILON)


def leading(g, r):
    return np.linalg.svd(g)[0][:, :r]


class GaLore:
    def __init__(self, w):
        self.w, self.m, self.v = w, 0.0, 0.0

    def step(self, g, t):
        tall = g.shape[0] > g.shape[1]
        g = g.T if tall else g
        if (t - 1) % REFRESH == 0:
            fresh = leading(g, RANK)
            # The signs of singular vectors are arbitrary, but m stays: keeps the direction of the previous vector.
            self.p = fresh if t == 1 else fresh * np.sign((fresh * self.p).sum(axis=0))
        n = adam(self, self.p.T @ g, t)
        n = 0.25 * (self.p @ n)
        self.w = self.w - LR * ((n.T if tall else n) + DECAY * self.w)


class LDAdam:
    def __init__(self, w):
        self.w, self.m, self.v, self.e = w, 0.0, 0.0, 0.0

    def step(self, g, t):
        tall = g.shape[0] > g.shape[1]
        a = (g.T if tall else g) + self.e
        if t == 1:
            u = leading(a, RANK)
            self.e = a - u @ u.T @ a
        else:
            before, m_hat = self.u, self.m / (1 - BETA1 ** (t - 1))
            v_hat = self.v / (1 - BETA2 ** (t - 1))
            b = 0.908 * before @ m_hat + (1 - 0.908) * a
            u, triangle = np.linalg.qr(b @ (b.T @ before))
            u = u * np.sign(np.diag(triangle))
            turn = u.T @ before
            back = before @ self.m
            self.v = (1 - BETA2 ** (t - 1)) * np.abs(turn**2 @ (v_hat - m_hat**2) + (turn @ m_hat) ** 2)
            self.m = turn @ self.m
            self.e = a - u @ u.T @ a + BETA1 / (1 - BETA1) * (back - u @ self.m)
        self.u = u
        n = u @ adam(self, u.T @ a, t)
        self.w = self.w - LR * ((n.T if tall else n) + DECAY * self.w)


def run(kind, first, rows, cols):
    start = uniform(10**9 + first, rows * cols).reshape(rows, cols)
    one = kind(start)
    for t in UPDATES:
        one.step(gradient(t, first, rows, cols, kind is not Muon), t)
    return start, one.w


def compare_with_torch():
    try:
        import unittest.mock

        import torch
        import torch.optim._muon
    except ImportError:
        print("skipped torch.optim.Muon: PyTorch is not installed, or has none")
        return
    for rows, cols in ((12, 20), (24, 10)):
        start, final = run(Muon, 0, rows, cols)
        for name, dtype, bound in (("float64", torch.float64, 1e-7), ("bfloat16", torch.bfloat16, 0.1)):
            w = torch.nn.Parameter(torch.tensor(start))
            muon = torch.optim.Muon([w], lr=LR, weight_decay=DECAY, momentum=0.95, adjust_lr_fn="match_rms_adamw")
            with unittest.mock.patch.object(torch, "bfloat16", dtype):
                for t in UPDATES:
                    w.grad = torch.tensor(gradient(t, 0, rows, cols, False))
                    muon.step()
            error = np.abs(w.detach().numpy() - final).max()
            print(f"torch.optim.Muon {torch.__version__}, {rows} x {cols}, iterations in {name}: "
                  f"largest difference of a weight {error:.1e} <= {bound:.0e}, of weights that moved by "
                  f"{np.abs(final - start).max():.2f}")
            assert error <= bound


def write(path, arrays):
    header, at, types = {}, 0, {"float32": "F32", "float64": "F64"}
    for name, a in arrays.items():
        header[name] = {"dtype": types[a.dtype.name], "shape": list(a.shape), "data_offsets": [at, at + a.nbytes]}
        at += a.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for a in arrays.values():
            f.write(np.ascontiguousarray(a).tobytes())


def main():
    arrays = {}
    for kind in (Muon, GaLore, LDAdam):
        for shape, matrices in SHAPES.items():
            first, parts = 0, []
            for rows, cols in matrices:
                parts.append(run(kind, first, rows, cols))
                first += rows * cols
            name = f"{kind.__name__.lower()}.{shape}"
            arrays[name + ".start"] = np.concatenate([p[0] for p in parts]).astype(np.float32)
            arrays[name + ".final"] = np.concatenate([p[1] for p in parts])
    spectrum = gradient(7, 0, 16, 40, True).astype(np.float32)
    arrays["spectrum"] = spectrum
    arrays["spectrum.basis"] = leading(spectrum.astype(np.float64), RANK).T.copy()
    path = os.path.join(os.path.dirname(__file__), "../test/fixtures/optimizers_matrix.safetensors")
    write(path, arrays)
    print(f"wrote {os.path.normpath(path)}: {os.path.getsize(path)} bytes")
    compare_with_torch()


main()
