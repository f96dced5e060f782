#!/usr/bin/env python3
"""objectives.py: losses of the preference objectives and their derivatives, as an oracle for llmtrain/run/objectives.h.

    python3 dev/peers/objectives.py          # rewrites dev/test/fixtures/objectives.txt

The formulas of TRL in decimals of 460 digits, so that nothing cancels, and derivatives by central differences of them,
so that no formula of a derivative is needed. With TRL (pip install trl, PyTorch for the CPU) they are compared with its
own code: the loops of DPOTrainer and KTOTrainer over loss types, taken from their sources, and the functions of
CPOTrainer and ORPOTrainer, which computes in float32.

A line has: objective, beta, margin, label smoothing, x of the chosen answer, of the rejected one, the loss, and its two
derivatives.
x is the sum, or for ipo, simpo and orpo the mean, of an answer's log-probabilities, less the reference's. Smoothing is
that of cDPO ("A Note on DPO with Noisy Preferences"), which TRL has as label_smoothing of CPO; its DPO loss `robust`
subtracts the second term and divides by 1 - 2 e.
"""

import ast
import os
import textwrap
from decimal import Decimal, getcontext

getcontext().prec = 460  # e^-800 beside 1, and differences of that
STEP = Decimal(10) ** -30
HERE = os.path.dirname(os.path.abspath(__file__))
FIXTURE = os.path.join(HERE, "..", "test", "fixtures", "objectives.txt")


def log_sigmoid(z):
    return -(1 + (-z).exp()).ln()


def log1mexp(x):
    return (1 - x.exp()).ln()


def dpo(c, r, beta, margin, e):
    z = beta * (c - r)
    return -(1 - e) * log_sigmoid(z) - e * log_sigmoid(-z)


def ipo(c, r, beta, margin, e):
    return (c - r - 1 / (2 * beta)) ** 2


def simpo(c, r, beta, margin, e):
    return -log_sigmoid(beta * (c - r - margin / beta))


def orpo(c, r, beta, margin, e):
    return -c - beta * log_sigmoid((c - r) - (log1mexp(c) - log1mexp(r)))


def hinge(c, r, beta, margin, e):
    return max(1 - beta * (c - r), Decimal(0))


def kto(x, r, beta, margin, e):
    """Of a desirable answer, whose margin is already subtracted; an undesirable one gives -x."""
    return 1 - 1 / (1 + (-beta * x).exp())


LOSSES = {"dpo": dpo, "ipo": ipo, "simpo": simpo, "orpo": orpo, "hinge": hinge, "kto": kto}


def evaluate(name, numbers):
    """The loss and its derivatives by c and r, rounded to float64."""
    c, r, beta, margin, e = (Decimal(x) for x in numbers)
    f = LOSSES[name]
    loss = f(c, r, beta, margin, e)
    by_c = (f(c + STEP, r, beta, margin, e) - f(c - STEP, r, beta, margin, e)) / (2 * STEP)
    by_r = 0 if name == "kto" else (f(c, r + STEP, beta, margin, e) - f(c, r - STEP, beta, margin, e)) / (2 * STEP)
    return [float(loss), float(by_c), float(by_r)]


def cases():
    """(name, (c, r, beta, margin, smoothing)): ordinary ones, and what cancels, overflows or underflows."""
    pairs = [(0.0, 0.0), (-3.25, -7.5), (2.125, -1.75), (-41.5, 3.0), (1e-9, 0.0), (-0.3, -0.3000000001), (17.0, -19.5)]
    for x in (20.0, 40.0, 300.0, 700.0, 740.0, 800.0, 5e4):  # |z| with beta 1
        pairs += [(x, 0.0), (0.0, x)]
    for c, r in pairs:
        yield "dpo", (c, r, 1.0, 0.0, 0.0)
        yield "simpo", (c, r, 1.0, 0.5, 0.0)
    for beta in (0.1, 0.01, 2.5):
        for c, r in pairs[1:7]:
            yield "simpo", (c, r, beta, 1.25, 0.0)
            yield "hinge", (c, r, beta, 0.0, 0.0)
            yield "ipo", (c, r, beta, 0.0, 0.0)
            yield "kto", (c - r, 0.0, beta, 0.0, 0.0)
            for e in (0.0, 0.1, 0.4):
                yield "dpo", (c, r, beta, 0.0, e)
    for z in (800.0, -800.0):
        yield "dpo", (z, 0.0, 1.0, 0.0, 0.1)
        yield "hinge", (z, 0.0, 1.0, 0.0, 0.0)
        yield "ipo", (z, 0.0, 0.1, 0.0, 0.0)
    for x in (0.0, 1e-12, 1.0, 20.0, 36.0, 50.0, 700.0, 800.0):
        yield "kto", (x, 0.0, 1.0, 0.0, 0.0)
        yield "kto", (-x, 0.0, 1.0, 0.0, 0.0)
    means = [-1e-7, -1e-3, -0.1, -0.7, -2.0, -30.0, -750.0]
    for c in means:
        for r in means:
            yield "orpo", (c, r, 0.1, 0.0, 0.0)
    yield "orpo", (-1.0, -1.00000000001, 2.0, 0.0, 0.0)


def find(tree, wanted):
    return next(node for node in ast.walk(tree) if wanted(node))


def code_of(method, wanted):
    """A statement of a method of TRL, to be executed with other variables."""
    import inspect
    tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    return compile(ast.Module([find(tree, wanted)], []), "trl", "exec")


def peers():
    """(name, function of c, r, beta, margin, e as tensors, tolerance) by TRL's own code."""
    import inspect
    from types import SimpleNamespace

    import torch
    import torch.nn.functional as F
    from trl import DPOTrainer, KTOTrainer
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    loop = code_of(DPOTrainer._compute_loss, lambda n: isinstance(n, ast.For) and "loss_types" in ast.dump(n.iter))

    def dpo_loop(kind):
        def run(c, r, beta, margin, e):
            # Two tokens in each completion: TRL divides the sums by that for ipo.
            factor = 2 if kind == "ipo" else 1
            this = SimpleNamespace(loss_types=[kind], loss_weights=[1.0], beta=beta, label_smoothing=e,
                                   use_weighting=False)
            names = {"self": this, "F": F, "torch": torch, "loss": 0.0, "chosen_scores": factor * c,
                     "rejected_scores": factor * r, "delta_score": factor * (c - r), "device": "cpu",
                     "completion_mask": torch.ones(2, 2)}
            exec(loop, names)
            return names["loss"]
        return run

    def cpo(kind):
        def run(c, r, beta, margin, e):
            this = SimpleNamespace(loss_type=kind, simpo_gamma=margin, beta=beta, label_smoothing=e, alpha=0.0,
                                   accelerator=SimpleNamespace(device="cpu"))
            return CPOTrainer.cpo_loss(this, c, r)[0].sum()
        return run

    def odds(c, r, beta, margin, e):
        this = SimpleNamespace(beta=beta, accelerator=SimpleNamespace(device="cpu"))
        return (-c - ORPOTrainer.odds_ratio_loss(this, c, r)[0]).sum()

    source = ast.parse(textwrap.dedent(inspect.getsource(KTOTrainer._compute_loss)))

    def kto_of(name):
        expression = find(source, lambda n: isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name) and
                          n.targets[0].id == name and "kl" in ast.dump(n)).value
        code = compile(ast.Expression(expression), "trl", "eval")

        def run(c, r, beta, margin, e):
            kl = torch.tensor(0.75, dtype=torch.float64)  # what --margin is
            names = {"self": SimpleNamespace(beta=beta), "F": F, "kl": kl, "chosen_logratios": c + kl,
                     "rejected_logratios": kl - c}
            return eval(code, names).sum()
        return run

    def clean(numbers):
        return numbers[4] == 0

    return [("dpo", dpo_loop("sigmoid"), 1e-12, clean), ("dpo", cpo("sigmoid"), 1e-12, None),
            ("ipo", dpo_loop("ipo"), 1e-12, None), ("hinge", dpo_loop("hinge"), 1e-12, None),
            ("simpo", cpo("simpo"), 1e-12, None), ("orpo", odds, 3e-6, None),
            ("kto", kto_of("chosen_losses"), 1e-12, None), ("kto", kto_of("rejected_losses"), 1e-12, None)], torch


def compare():
    """With TRL, where its own rounding is small: |z| up to 36, and p up to 1 - 1e-3 for orpo."""
    try:
        found, torch = peers()
    except ImportError as missing:
        print(f"not compared with TRL: {missing}; pip install trl")
        return
    for name, function, tolerance, wanted in found:
        count = worst = 0
        for case, numbers in cases():
            c, r, beta, margin, e = numbers
            mild = abs(beta * (c - r)) <= 36 and (name != "orpo" or (min(c, r) > -40 and max(c, r) < -1e-4))
            if case != name or not mild or (wanted and not wanted(numbers)):
                continue
            tensors = [torch.tensor([x], dtype=torch.float64, requires_grad=True) for x in (c, r)]
            loss = function(*tensors, beta, margin, e)
            loss.backward()
            exact = evaluate(name, numbers)
            by = [0.0 if t.grad is None else t.grad.item() for t in tensors]
            for got, expected in zip([loss.item(), *by], exact):
                # 1 - sigmoid cancels: its error is that of 1.
                worst = max(worst, abs(got - expected) / max(abs(expected), 1.0 if name == "kto" else 1e-3 * beta))
            count += 1
        print(f"{name}: {count} cases, TRL differs by {worst:.1e} at most")
        assert count > 5 and worst < tolerance, name


def main():
    compare()
    with open(FIXTURE, "w", encoding="utf-8") as file:
        file.write("# Written by dev/peers/objectives.py: objective, beta, margin, label smoothing, x of both answers, "
                   "the loss, its derivatives\n")
        count = 0
        for name, (c, r, beta, margin, e) in cases():
            numbers = (beta, margin, e, c, r, *evaluate(name, (c, r, beta, margin, e)))
            file.write(" ".join([name, *(f"{x:.17g}" for x in numbers)]) + "\n")
            count += 1
    print(f"{os.path.relpath(FIXTURE)}: {count} cases, {os.path.getsize(FIXTURE)} bytes")


if __name__ == "__main__":
    main()
