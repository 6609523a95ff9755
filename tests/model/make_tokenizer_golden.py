#!/usr/bin/env python3
"""Encodes texts with Hugging Face tokenizers and writes tokenizer_golden.json, which
tokenizer_golden_test.cc compares with.

    LACUNA_DATA_DIR=... make_tokenizer_golden.py      needs tokenizers (0.23.3 was used)

Three parts: ids of DeepSeek-V3's tokenizer (its file is in the data folder, not here); a small BPE
trained here, with the regular expression of GLM and cl100k; and the same BPE, trained without
regard to words so that its merges cross every boundary, under many pre-tokenizers, added tokens and
post-processors. Random characters are of Unicode 14, which PCRE2 10.42 knows.
"""
import json
import os
import random
import unicodedata
from pathlib import Path

import tokenizers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = Path(__file__).resolve().parent
GLM_REGEX = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
             r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")

TEXTS = [
    "Hello, world! 12345 日本語テスト <｜User｜>hi", "", " ", "  ", "\n", "a", " a", "a ", "\t\tx",
    "The quick brown fox jumps over the lazy dog. It's 10 o'clock; they'll've gone, I'M SURE.",
    "Ünïcödé naïve café – “quotes” … and—dashes", "Привет, мир! Как дела? Ёлка 2024 года.",
    "Καλημέρα κόσμε, τι κάνεις;", "مرحبا بالعالم ١٢٣٤٥ كيف حالك؟", "שלום עולם, מה שלומך?",
    "नमस्ते दुनिया, आप कैसे हैं? १२३", "สวัสดีชาวโลก วันนี้เป็นอย่างไรบ้าง", "안녕하세요 세계! 오늘은 어때요?",
    "你好，世界！今天是2024年5月17日，天气怎么样？我们去吃饭吧。", "こんにちは、世界。カタカナとひらがな・漢字ｶﾅ",
    "გამარჯობა მსოფლიო Բարեւ աշխարհ", "ቋንቋ ሰላም ዓለም ብዙ", "Xin chào thế giới, tiếng Việt có dấu",
    "😀 😃👨‍👩‍👧‍👦 👍🏽 🏳️‍🌈 e\u0301 n\u0303o ☃️ ✔✖", "zero\u200bwidth\u200djoin\ufeffbom\u00a0nbsp\u3000wide\u2028line\u180eend",
    "1 12 123 1234 12345678901 3.14159 1,000,000 1e-5 0x1F ½ Ⅷ ① ٤٢ 𝟘𝟙",
    "def f(x: int) -> str:\n    \"\"\"Doc.\"\"\"\n    if x >= 10:\n\t\treturn f'{x!r:>10}'\n\n\n    return \"\"  # done\n",
    "#include <vector>\nint main() { std::vector<int> v{1,2,3}; for (auto& x : v) x <<= 2; return v[0]!=4; }\r\n",
    "SELECT * FROM t WHERE a_b = 'it''s' AND c<>3; -- x\n", "{\"k\": [1, 2.50, null, true], \"n\": {\"a\\n\": \"é\"}}",
    "https://example.org/a/b?c=d&e=%20f#frag user@mail.example", "<div class=\"a b\">x &amp; y</div>\n\n\n  <br/>",
    "   leading", "trailing   ", "a  b   c    d", "a\n\n\n\nb", "a \n b \r\n c\r\rd", "\n \n  \n   x", "    \n    ", " \t \n\t x",
    "x" * 200, "ab" * 100, " " * 100, "\n" * 50, "1" * 50, "!" * 70, "é" * 60, "a1" * 40, "日" * 80,
    "camelCaseAndHTTPServer snake_case_name kebab-case-name SCREAMING_CASE", "$100 €50 £3 ¥20 50% ±1 ≤2 →x ∑∞",
    "'tis 'Twas don't DON'T they'RE we'd y'all's rock'n'roll 'lls'd", "...!!! ???.. --- *** ``` ~~~ ^^^ (((a)))",
    "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜></think>Hello<｜end▁of▁sentence｜>",
    "a<｜User｜><｜User｜> b <|EOT|>\n<｜tool▁calls▁begin｜>x<｜tool▁sep｜>", "<｜User <｜User｜ <|EOT|> |> <｜｜>",
    "<｜fim▁hole｜>def<｜fim▁begin｜> x<｜fim▁end｜>", "<｜place▁holder▁no▁7｜><｜▁pad▁｜><｜place▁holder▁no▁77｜>",
    "\x00\x01\x1f\x7f\x80\x9f\u00ad", "\U0001F1E9\U0001F1EA\U0001F468\u200d\U0001F52C\U00020000\U0010FFFD\ue000\ufffd",
]


def random_texts(count, seed):
    rng = random.Random(seed)
    by_category = {}
    for c in range(0x20, 0x110000):
        category = unicodedata.category(chr(c))
        if category not in ("Cn", "Cs", "Co"):
            by_category.setdefault(category, []).append(chr(c))
    common = list(" \n\t\r  abcXYZ019.,'!?-_éßжα日本กあ한١") + ["'s", "\r\n", "  ", "123"]
    texts = []
    for _ in range(count):
        parts = []
        for _ in range(rng.randint(5, 40)):
            if rng.random() < 0.5:
                parts.append(rng.choice(common))
            else:
                parts.append(rng.choice(by_category[rng.choice(sorted(by_category))]))
        texts.append("".join(parts))
    return texts


def cases(tokenizer, texts, special=False):
    return [[t, tokenizer.encode(t, add_special_tokens=special).ids] for t in texts]


def train(pre_tokenizer, size):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        TEXTS * 3, trainers.BpeTrainer(vocab_size=size, show_progress=False, min_frequency=2,
                                       initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return json.loads(tokenizer.to_str())


def compact(file):
    """Without what can be made again: the vocabulary is the alphabet, then the merges in order."""
    vocab = sorted(file["model"]["vocab"].items(), key=lambda item: item[1])
    file["model"]["vocab"] = [entry for entry, _ in vocab]
    file["model"]["merges"] = [" ".join(m) for m in file["model"]["merges"]]
    return file


def split(regex, behavior="Isolated", invert=False, kind="Regex"):
    return {"type": "Split", "pattern": {kind: regex}, "behavior": behavior, "invert": invert}


def byte_level(use_regex=False, add_prefix_space=False):
    return {"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": True,
            "use_regex": use_regex}


def variants():
    sequence = lambda *steps: {"pre_tokenizer": {"type": "Sequence",
                                                 "pretokenizers": [*steps, byte_level()]}}
    yield "plain", {"pre_tokenizer": byte_level()}
    yield "ByteLevel regex", {"pre_tokenizer": byte_level(True)}
    yield "prefix space", {"pre_tokenizer": byte_level(False, True)}
    yield "prefix space and regex", {"pre_tokenizer": byte_level(True, True)}
    for behavior in ("Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous"):
        for invert in (False, True):
            yield f"{behavior} {invert}", sequence(split(r"\s|[.,]", behavior, invert))
    yield "string", sequence(split("a.", "MergedWithPrevious", kind="String"), split("(", kind="String"))
    yield "digits", sequence({"type": "Digits", "individual_digits": False})
    yield "single digits", sequence({"type": "Digits", "individual_digits": True})
    yield "empty matches", sequence(split("x*|(?=b)"))
    yield "words", sequence(split(r"\w+"), split(r"[\s]+|[^\S\n]"))
    yield "lines", sequence(split("^.|.$"))
    yield "look behind", sequence(split(r"(?<=[a-z])(?=[A-Z])|\h+(?!\d)"))
    yield "scripts", sequence(split(r"\p{Han}+|\p{Cyrillic}|[^\p{Latin}\s]"))
    ids = lambda *names: [{"id": 600 + i, "content": n, "single_word": False, "lstrip": False,
                           "rstrip": False, "normalized": False, "special": i % 2 == 0, **more}
                          for i, (n, more) in enumerate(names)]
    base = {"pre_tokenizer": byte_level(True)}
    yield "added", {**base, "added_tokens": ids(
        ("<s>", {}), ("<l>", {"lstrip": True}), ("<r>", {"rstrip": True}),
        ("<b>", {"lstrip": True, "rstrip": True}), ("word", {"single_word": True}),
        ("<s><s>", {"normalized": True}))}
    token = {"id": "<s>", "ids": [600], "tokens": ["<s>"]}
    item = lambda name: {"SpecialToken": {"id": name, "type_id": 0}}
    template = {"type": "TemplateProcessing",
                "single": [item("<s>"), {"Sequence": {"id": "A", "type_id": 0}}, item("</s>")],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}},
                         {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {"<s>": token,
                                   "</s>": {"id": "</s>", "ids": [601], "tokens": ["</s>"]}}}
    two = ids(("<s>", {}), ("</s>", {}))
    yield "template", {**base, "added_tokens": two, "post_processor": template}
    yield "template in a sequence", {**base, "added_tokens": two, "post_processor": {
        "type": "Sequence", "processors": [byte_level(), template]}}


def main():
    glm = train(pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(GLM_REGEX), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]), 900)
    glm_tokenizer = Tokenizer.from_str(json.dumps(glm))
    loose = train(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), 600)
    short = [t for t in TEXTS if len(t) < 60 and "｜" not in t] + [
        "aXxbXxxb", "a.b.(c(d", "foo <s> <l> bar <l>x<r>  y<b> z", "word words sword word. _word 語word",
        "word<s><s> <r> <r>\n<b>\t\n<b>", "<s>x</s>", "deadBeef 12 CAFE\n9f", "a\nb\n\nc"]
    out_variants = []
    for name, changes in variants():
        tokenizer = Tokenizer.from_str(json.dumps({**loose, **changes}))
        special = name.startswith("template")
        texts = short[-8:] if special else short[::3] + short[-8:] + random_texts(4, name)
        out_variants.append({"name": name, "changes": changes, "special": special,
                             "cases": cases(tokenizer, texts, special)})
    deepseek = Tokenizer.from_file(
        str(Path(os.environ["LACUNA_DATA_DIR"]) / "tokenizers/deepseek_v3/tokenizer.json"))
    texts = TEXTS + random_texts(250, 1)
    out = {"about": "Written by make_tokenizer_golden.py with tokenizers " + tokenizers.__version__,
           "deepseek_v3": cases(deepseek, texts),
           "glm": {"file": compact(glm), "cases": cases(glm_tokenizer, TEXTS + random_texts(60, 2))},
           "loose": compact(loose), "variants": out_variants}
    text = json.dumps(out, ensure_ascii=False, separators=(",", ":"))
    (HERE / "tokenizer_golden.json").write_text(text.replace('],["', '],\n["') + "\n")


if __name__ == "__main__":
    main()
