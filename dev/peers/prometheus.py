"""Reads a file of --prometheus with Prometheus' own parsers, and checks what node_exporter asks of it.

    python3 dev/peers/prometheus.py run.prom

prometheus_client parses the text format; node_exporter's textfile collector refuses time stamps, a file without a line
break at its end, and metrics of one name with different help. Prints the metrics, or what is wrong, with exit code 1.
"""
import math
import sys

try:
    from prometheus_client.parser import text_string_to_metric_families
except ImportError as missing:
    print(f"skipped: {missing}; pip install prometheus_client", file=sys.stderr)
    sys.exit(0)

text = open(sys.argv[1], encoding="utf-8", newline="").read()
wrong = [] if text.endswith("\n") else ["no line break at the end"]
families = list(text_string_to_metric_families(text))
names = [family.name for family in families]
wrong += [f"{name} is there twice" for name in set(names) if names.count(name) > 1]
for family in families:
    for sample in family.samples:
        print(f"{family.type:8} {sample.name}{sample.labels} {sample.value}")
        if family.type not in ("gauge", "counter"):
            wrong.append(f"{family.name} has no type")
        if family.type == "counter" and not (sample.name.endswith("_total") and sample.value >= 0):
            wrong.append(f"{sample.name} is no counter")
        if not family.documentation or sample.timestamp is not None or set(sample.labels) != {"run"}:
            wrong.append(f"{sample.name}: help {family.documentation!r}, time {sample.timestamp}, {sample.labels}")
        if not sample.name.startswith("llmtrain_") or math.isinf(sample.value) and family.name != "llmtrain_loss":
            wrong.append(f"{sample.name} is {sample.value}")
        if len(family.samples) != 1:
            wrong.append(f"{family.name} has {len(family.samples)} samples")
print(f"{len(families)} metrics, {len(wrong)} wrong: {'; '.join(wrong)}")
sys.exit(1 if wrong or len(families) < 20 else 0)
