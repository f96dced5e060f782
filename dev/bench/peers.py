"""peers.py: PyTorch's speed on the same GPU, to compare the ladders and the trainer with.

    python3 dev/bench/peers.py                      matmuls, attention, compiled GPT-2s; a minute or two
    python3 dev/bench/peers.py --only attention
    python3 dev/bench/peers.py --gpt2 "124M:64"     this size with this batch
    python3 dev/bench/peers.py --seconds 40         skips parts that have not begun by then

Attention: scaled_dot_product_attention, causal, bfloat16, by its flash and its cuDNN backend: D = 64 and 128, 16,384
tokens and H D = 2048 at every T. Operations are counted for the half of the matrix below the diagonal: 4 B H T^2 D / 2
forward, 2.5 times that backward, as the FlashAttention papers count. GPT-2 in plain PyTorch, compiled, bfloat16 with
fp32 weights, at T = 1024 and the trainer's batches: tokens per second, and the percentage of --peak (TFLOP/s; the
same as the trainer's) by the trainer's count of operations per token. The smallest is compiled as a whole; for the
others that takes minutes, so only their blocks are compiled, which are all alike.

One line per measurement: text, then the same as a JSON object. Without PyTorch or a GPU it says so and exits with 77.
"""

import argparse
import json
import statistics
import sys
import time

SKIPPED = 77  # the exit status for "nothing to run with"

try:
    import torch
    import torch.nn.functional as F
    from torch import nn

    from peers_model import Transformer
except ImportError:
    print("there is no PyTorch here")
    sys.exit(SKIPPED)


def milliseconds(run, rounds=20, warm_up=5):
    """The median time of run() on the GPU, each after reading memory larger than the L2 cache.

    Written lines would be written back to memory during the timed run; read ones are just dropped.
    """
    cache = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 0)
    sweep = torch.zeros(max(4 * cache, 256 << 20) // 4, dtype=torch.float32, device="cuda")
    for _ in range(warm_up):
        run()
    times = []
    for _ in range(rounds):
        sweep.sum()
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        run()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended))
    return statistics.median(times)


def tell(what, **numbers):
    text = "  ".join(f"{key} {value:.6g}" for key, value in numbers.items())
    print(f"{what:<24} {text}")
    print(json.dumps({"peer": what, "torch": torch.__version__, **numbers}), flush=True)


# ----------------------------------------------------------------------------------------------------
# Matmuls: out (M, N) = in (M, K) weight (N, K)^T, and a square one, whose speed is the library's peak


def product(M, N, K):
    a = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(N, K, device="cuda", dtype=torch.bfloat16)
    ms = milliseconds(lambda: F.linear(a, w))
    tell("product bf16", M=M, N=N, K=K, ms=ms, tflops=2e-9 * M * N * K / ms)


def products(_):
    product(8192, 8192, 8192)
    for M, C in ((65536, 768), (32768, 1600)):  # the tokens and channels of 124M and 1558M
        for N, K in ((3 * C, C), (C, C), (4 * C, C), (C, 4 * C)):
            product(M, N, K)
        product(M // 4, 50304, C)


# ----------------------------------------------------------------------------------------------------
# Attention


def attention(options):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    tokens, width = 16384, 2048
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
        for D in (64, 128):
            for T in (1024, 4096, 16384):
                if time.monotonic() > options.deadline:
                    return
                B, H = tokens // T, width // D
                like = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
                q, k, v = (torch.randn(B, H, T, D, **like) for _ in range(3))
                dout = torch.randn_like(q)
                forward_flops = 4.0 * B * H * T * T * D / 2
                try:
                    with sdpa_kernel(backend):
                        forward = milliseconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), 10, 3)
                        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                        backward = milliseconds(
                            lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True), 10, 3)
                except RuntimeError as problem:
                    print(f"attention {name}: D {D} T {T} is not supported: {str(problem).splitlines()[0]}")
                    continue
                tell(f"attention {name}", B=B, T=T, H=H, D=D, forward_ms=forward, backward_ms=backward,
                     forward_tflops=1e-9 * forward_flops / forward,
                     backward_tflops=1e-9 * 2.5 * forward_flops / backward)


# ----------------------------------------------------------------------------------------------------
# GPT-2, of peers_model.py


VOCABULARY, PADDED_VOCABULARY = 50257, 50304
GPT2_SIZES = {"124M": (12, 12, 768), "350M": (24, 16, 1024), "774M": (36, 20, 1280), "1558M": (48, 25, 1600)}


def gpt2(options):
    whole = True
    for run in options.gpt2.split():
        size, B = run.split(":")
        if time.monotonic() > options.deadline:
            print(f"GPT-2 {size}: left out, the time is over")
            continue
        for batch in (int(B), int(B) // 2):  # half, where PyTorch needs more memory than the trainer
            try:
                if batch > 0:
                    gpt2_train(options, size, batch, whole)
                break
            except torch.cuda.OutOfMemoryError:
                print(f"GPT-2 {size}: a batch of {batch} does not fit into the GPU's memory")
            torch.compiler.reset()
            torch.cuda.empty_cache()
        whole = False
        torch.compiler.reset()
        torch.cuda.empty_cache()


def gpt2_train(options, size, B, whole, device="cuda", T=1024, steps=10, seconds_at_least=10):
    layers, H, C = GPT2_SIZES[size]
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    with torch.device(device):
        model = Transformer("gpt2", layers, H, C, 4 * C, PADDED_VOCABULARY, max(T, 1024))
        tokens = torch.randint(VOCABULARY, (B, T + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    run = model
    if whole:
        run = torch.compile(model)
    else:
        model.compile_parts()

    def step():
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = run(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()  # waits for the GPU, as a program that prints its loss does

    began = time.monotonic()
    for _ in range(3):
        loss = step()
    compiling = time.monotonic() - began
    times = []
    while len(times) < steps or sum(times) < seconds_at_least:  # clocks take seconds to settle
        began = time.monotonic()
        loss = step()
        times.append(time.monotonic() - began)
    seconds = statistics.median(times)
    looked_up = model.positions.weight.numel()  # the token embedding counts as a matmul, since it is the head
    padding = (PADDED_VOCABULARY - VOCABULARY) * C
    weights = sum(p.numel() for p in model.parameters()) - looked_up - padding
    flops_per_token = 6.0 * weights + 6.0 * layers * T * C
    rate = B * T / seconds
    numbers = {"parameters": weights + looked_up, "B": B, "T": T, "ms": 1e3 * seconds, "tokens_per_second": rate,
               "tflops": 1e-12 * rate * flops_per_token, "loss": loss, "compile_seconds": compiling}
    if options.peak:
        numbers["mfu_percent"] = 1e-10 * rate * flops_per_token / options.peak
    tell(f"GPT-2 {size} compiled" if whole else f"GPT-2 {size} compiled by block", **numbers)


# ----------------------------------------------------------------------------------------------------


def main():
    parts = {"products": products, "attention": attention, "gpt2": gpt2}
    parser = argparse.ArgumentParser(description="PyTorch on the same GPU")
    parser.add_argument("--only", choices=list(parts), help="this part alone")
    parser.add_argument("--seconds", type=float, default=90, help="nothing begins later than this [90]")
    parser.add_argument("--gpt2", default="124M:64 1558M:32", metavar="SIZE:BATCH ...", help="[%(default)s]")
    parser.add_argument("--peak", type=float, default=0, help="TFLOP/s that mfu is a part of; 0: no mfu [0]")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("PyTorch sees no GPU here")
        return SKIPPED
    options.deadline = time.monotonic() + options.seconds
    print(f"PyTorch {torch.__version__} on {torch.cuda.get_device_name()}")
    failures = 0
    for name, run in parts.items():
        if options.only not in (None, name):
            continue
        if time.monotonic() > options.deadline:
            print(f"{name}: left out, the time is over")
            continue
        try:
            run(options)
        except Exception as problem:  # the other parts can still be measured
            print(f"{name} FAILED: {type(problem).__name__}: {problem}")
            failures += 1
        torch.cuda.empty_cache()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
