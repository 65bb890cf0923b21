#!/usr/bin/env python3
"""Writes tokens.json: texts and their ids by the `tokenizers` package (0.23), for tests/reference.rs.

usage: generate_tokens.py TESTDATA/models   (needs: pip install tokenizers)
"""
import copy, json, pathlib, random, sys
from tokenizers import Tokenizer

root = pathlib.Path(sys.argv[1])
rng = random.Random(7)
spaces = [" ", "\t", "\n", "\r\n", "\u00a0", "\u2029", "\u3000", "\u200b", "\x0b", "\x85"]
pieces = ["a", "the", "Hello", "world", "llama", "naïve", "ÉCOLE", "straße", "don't", "I'LL", "we'Ve", "'tis", "x", "42", "1234567", "３４", "٣٤٥", "४२",
          "²³", "Ⅷ", "e\u0301", "n\u0303o", "क्षि", "กำ", "한국어", "你好世界", "かな", "🦙", "👩‍👩‍👧‍👦", "🏳️‍🌈", "é", "ﬁ", "Ａ", "...", "?!", "->", "==", "(x)", "{", "}",
          "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<unk>", "<0x41>", "▁", "Ġ", "\x00", "\x7f", "_", "#", "//", "$1,234.56"]

def text():
    kind = rng.randrange(6)
    if kind == 0: return rng.choice(spaces) * rng.randint(1, 70) + rng.choice(pieces + [""])
    if kind == 1: return "".join(rng.choice(pieces) for _ in range(rng.randint(1, 8)))
    if kind == 2: return "".join(rng.choice(spaces) * rng.randint(1, 4) + rng.choice(pieces) for _ in range(rng.randint(1, 6)))
    if kind == 3: return " ".join(rng.choice(pieces) for _ in range(rng.randint(1, 10))) + rng.choice(["", " ", "\n"])
    if kind == 4: return "".join(chr(rng.choice([rng.randrange(32, 127), rng.randrange(0xa0, 0x250), rng.randrange(0x300, 0x370), rng.randrange(0x370, 0x600), rng.randrange(0x4e00, 0x5000), rng.randrange(0x1f300, 0x1f700)])) for _ in range(rng.randint(1, 12)))
    return rng.choice(["a", "A", "1", "!", "é", " a", "a ", "\n a", "ab", "'s"]) * rng.randint(1, 60)

texts = [text() for _ in range(500)]
models = {}
for name in ["llama-gqa", "llama3-rope-tied", "qwen3-qknorm"]:
    t = Tokenizer.from_file(str(root / name / "hf/tokenizer.json"))
    models[name] = [t.encode(s, add_special_tokens=False).ids for s in texts]

# The llama vocabulary with each way of placing the space before a word, and an added token of each kind.
base = json.loads((root / "llama-gqa/hf/tokenizer.json").read_text())
schemes = {"legacy": None, "first": "first", "always": "always", "never": "never"}
tried = ["a", " a", "  a", "<s>a", "<s> a", "a<x>b", "a <x> b", "<x>a", "a<s>b", " <s> <x> ", "<s><s>a", "a<x><x>b", "", " ", "<x>", "a b<s>c d"]
variants = []
for scheme in schemes:
    for normalized in [False, True]:
        j = copy.deepcopy(base)
        if schemes[scheme]:
            j["normalizer"] = None
            j["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": schemes[scheme], "split": False}
            if scheme == "never": j["decoder"]["decoders"] = j["decoder"]["decoders"][:3]
        j["added_tokens"].append({"id": 512, "content": "<x>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": normalized, "special": False})
        t = Tokenizer.from_str(json.dumps(j))
        patch = {k: j[k] for k in ["normalizer", "pre_tokenizer", "decoder", "added_tokens"]}
        cases = []
        for s in tried:
            e = t.encode(s, add_special_tokens=False).ids
            cases.append([s, e, t.encode(s).ids, t.decode(e, skip_special_tokens=False)])
        variants.append({"name": f"{scheme}, normalized {normalized}", "patch": patch, "cases": cases})

out = json.dumps({"texts": texts, "models": models, "variants": variants}, ensure_ascii=True, separators=(",", ":"))
pathlib.Path(__file__).with_name("tokens.json").write_text(out + "\n")
