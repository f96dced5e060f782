"""What transformers makes of each key of a config.json, for dev/test/test_convert.c.

    python3 dev/peers/config_keys.py --write     rewrites dev/test/fixtures/config_keys.txt
    python3 dev/peers/config_keys.py             checks it against this transformers

Changes one key of the configuration of each fixture in dev/test/fixtures/models, computes its logits with transformers,
and writes what became of them. A key is one of the class' configuration, one of its other names, or one of the tables
in llmtrain/checkpoint/convert.h. Lines of the file, with tabs between words:

    values VALUE ...            the values that every key is given, as JSON
    key TYPE KEY OUTCOMES       a letter for the file without the key, then one per value: = the same logits, ~ others,
                                ! transformers fails
    size TYPE KEY A B           a key that sets a size: its value in a model of a file without it, and with null; none
                                if transformers fails
    rope TYPE OBJECT F ...      the frequencies of the pairs of a head with this "rope_scaling", 0 for none
"""

import copy
import json
import re
import sys
import warnings

sys.path = sys.path[1:]  # this folder has files named like packages
try:
    import torch
    import transformers
    from safetensors.torch import load_file
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(0)

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity(transformers.logging.CRITICAL)
torch.set_num_threads(1)
FIXTURES, FILE = "dev/test/fixtures/models", "dev/test/fixtures/config_keys.txt"
TYPES = ["gpt2", "llama", "mistral", "qwen2", "qwen3"]
VALUES = [None, True, False, 0, 1, -1, 0.5, 32, "", "relu", "gelu_new", "gelu_pytorch_tanh", "silu", "swish",
          ["full_attention"], ["full_attention", "sliding_attention"], {"0": [1]}]
SIZES = {  # the keys of our configuration, and where a model has them
    "n_embd": lambda m: m.config.n_embd, "n_layer": lambda m: m.config.n_layer, "n_head": lambda m: m.config.n_head,
    "n_inner": lambda m: m.transformer.h[0].mlp.c_fc.nf, "n_positions": lambda m: m.config.n_positions,
    "vocab_size": lambda m: m.config.vocab_size, "layer_norm_epsilon": lambda m: m.transformer.ln_f.eps,
    "tie_word_embeddings": lambda m: m.config.tie_word_embeddings, "hidden_size": lambda m: m.config.hidden_size,
    "num_hidden_layers": lambda m: m.config.num_hidden_layers,
    "num_attention_heads": lambda m: m.config.num_attention_heads,
    "num_key_value_heads": lambda m: m.model.layers[0].self_attn.k_proj.out_features
        // m.model.layers[0].self_attn.head_dim,
    "head_dim": lambda m: m.model.layers[0].self_attn.head_dim,
    "intermediate_size": lambda m: m.config.intermediate_size,
    "max_position_embeddings": lambda m: m.config.max_position_embeddings,
    "rms_norm_eps": lambda m: m.model.norm.variance_epsilon,
    "rope_theta": lambda m: m.config.rope_parameters["rope_theta"],
}
FACTORS = dict(factor=4.0, low_freq_factor=1.5, high_freq_factor=3.5, original_max_position_embeddings=16,
               rope_theta=500.0)


def table_keys(kind):
    """The keys of CONFIG_RULES for an architecture."""
    text = open("llmtrain/checkpoint/convert.h").read()
    llamas = re.search(r'#define RULE_LLAMAS "(.*)"', text)[1]
    text = text[text.index("CONFIG_RULES[] ="):]
    keys = set()
    table = text[:text.index("\n};")]
    for types, names in re.findall(r'\{(RULE_LLAMAS|"[^"]*"), ((?:"[^"]*"\s*)+),\s+RULE_', table):
        types = llamas if types == "RULE_LLAMAS" else types.strip('"')
        keys |= set(re.sub(r'"\s*"?', "", names).split("|")) if kind in (types or kind).split("|") else set()
    assert {"output_past", "unk_token_id", "hidden_act" if kind != "gpt2" else "summary_use_proj"} <= keys
    return keys


def make(config):
    """A model of a configuration's text; fails if transformers refuses it."""
    kind = transformers.CONFIG_MAPPING[config["model_type"]]
    return transformers.AutoModelForCausalLM.from_config(kind.from_dict(copy.deepcopy(config)), dtype=torch.float32)


class Fixture:
    def __init__(self, kind):
        directory = f"{FIXTURES}/{kind}"
        self.config = json.load(open(f"{directory}/config.json"))
        for key in ("rope_parameters", "dtype", "torch_dtype"):
            self.config.pop(key, None)
        index = f"{directory}/model.safetensors.index.json"
        try:
            files = set(json.load(open(index))["weight_map"].values())
        except FileNotFoundError:
            files = ["model.safetensors"]
        prefix = "" if kind != "gpt2" else "transformer."
        self.weights = {prefix + k: v.float() for f in files for k, v in load_file(f"{directory}/{f}").items()
                        if not k.endswith(".attn.bias")}
        head, embedding = "lm_head.weight", "transformer.wte.weight" if prefix else "model.embed_tokens.weight"
        self.weights.setdefault(head, self.weights[embedding])
        context = self.config.get("n_positions", self.config.get("max_position_embeddings"))
        self.tokens = torch.randint(0, 40, (2, context), generator=torch.Generator().manual_seed(1))
        self.logits = self.run(self.config)

    def run(self, config):
        model = make(config).eval()
        state = model.state_dict()
        if {k: v.shape for k, v in state.items()} != {k: v.shape for k, v in self.weights.items()}:
            return None
        model.load_state_dict(self.weights)
        with torch.no_grad():
            return model(self.tokens)[0 if not model.config.return_dict else "logits"]

    def outcome(self, config):
        try:
            logits = self.run(config)
        except Exception:
            return "!"
        return "=" if logits is not None and (logits - self.logits).abs().max() < 1e-6 else "~"

    def edited(self, key, *value):
        config = {k: v for k, v in self.config.items() if k != key}
        return config | {key: value[0]} if value else config


def size(fixture, key, *value):
    try:
        return json.dumps(SIZES[key](make(fixture.edited(key, *value))))
    except Exception:
        return "none"


def ropes():
    for kind in ("default", "linear", "llama3", "dynamic", "longrope", "proportional", "yarn", "su", "mrope", ""):
        yield {"rope_type": kind} | FACTORS
    yield {"type": "linear"} | FACTORS
    for key in [*FACTORS, "rope_type"]:
        for change in (None, 1.0, 8):
            yield {k: v for k, v in ({"rope_type": "llama3"} | FACTORS | {key: change}).items() if v is not None}
    yield {"rope_type": "linear", "factor": 2.0}
    yield {"rope_type": "default"}
    yield {"rope_theta": 500.0}
    yield {}


def frequencies(fixture, rope):
    """What a head's pairs are turned by per position; nothing if transformers fails or scales them otherwise."""
    try:
        model = make(fixture.edited("rope_scaling", rope)).eval()
        turn = model.model.rotary_emb
        return [f"{f:.8g}" for f in turn.inv_freq.tolist()] if turn.attention_scaling == 1 else ["0"]
    except Exception:
        return ["0"]


def lines():
    yield ["values", *map(json.dumps, VALUES)]
    for kind in TYPES:
        fixture = Fixture(kind)
        known = transformers.AutoConfig.for_model(kind)
        names = set(known.to_dict()) | ({"head_dim", "rope_theta"} if kind != "gpt2" else set())
        sizes = [key for key in SIZES if key in names]
        keys = set(known.to_dict()) | set(known.attribute_map) | table_keys(kind) | set(fixture.config)
        for key in sorted(keys - {*sizes, "model_type", "rope_scaling", "rope_parameters"}):
            outcomes = [fixture.outcome(fixture.edited(key))]
            outcomes += [fixture.outcome(fixture.edited(key, value)) for value in VALUES]
            yield ["key", kind, key, "".join(outcomes)]
        for key in sizes:
            yield ["size", kind, key, size(fixture, key), size(fixture, key, None)]
        for rope in ropes() if kind != "gpt2" else []:
            yield ["rope", kind, json.dumps(rope), *frequencies(fixture, rope)]


text = f"# transformers {transformers.__version__}: dev/peers/config_keys.py says what this is\n"
text += "".join("\t".join(line) + "\n" for line in lines())
if "--write" in sys.argv:
    open(FILE, "w").write(text)
    print(f"{FILE}: {len(text)} bytes")
else:
    saved = open(FILE).read().split("\n")
    differ = [line for line in set(saved) ^ set(text.split("\n")) if not line.startswith("#")]
    print(*sorted(differ), f"{len(differ)} lines differ", sep="\n")
    sys.exit(len(differ) > 0)
