"""A grammar leads the input of a tool as its text is written: escaped in JSON, or as it is before a mark."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from tokenizer_svc.grammar.lark_source import NotWritable
from tokenizer_svc.grammar.led_input import LedInput, as_lark

# After the form in which Codex describes its patches.
PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
ADDED = '*** Begin Patch\n*** Add File: a "b".py\n+print("x\\n", \'</par\')\n+\té\x07\n*** End Patch\n'
UPDATED = "*** Begin Patch\n*** Update File: a\n@@ def f(\n-x\\\n+y\n*** End of File\n*** End Patch"
SUMS = r"""
start: sum
// Whatever is added.
sum: product (("+" | "-") product)*
product: atom ("*" atom)*
atom: NUMBER | "(" sum ")" | QUOTED
QUOTED: /"[^"\n]*"/
%import common.NUMBER
%ignore / +/
"""
WORDS = r"""
start: (WORD ("\n" | "\t") | QUOTED)+
WORD: /[a-z\\]{1,3}/i & ~"no"
QUOTED: "\"" /[^"]/* "\""
"""
LISTS = r"""
start[lazy]: /(?s:.)*;/
"""

Accepts = Callable[[str], bool]


def matching(lark: str) -> Accepts:
    grammar = json.dumps({"grammars": [{"lark_grammar": lark}]})
    tokenizer = LLTokenizer("byte")

    def accepts(text: str) -> bool:
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        data = list(text.encode())
        return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()

    return accepts


def led(lark: str, *, in_json: bool = True, close: str = '"}') -> Accepts:
    made = LedInput(lark, 3, in_json=in_json, close=close)
    accepts = matching("\n".join([f'start: "<" {made.symbol} ">"', *made.rules, ""]))

    def follows(text: str) -> bool:
        written = json.dumps(text, ensure_ascii=False)[1:-1] if in_json else text
        return accepts(f"<{written}{close}>")

    return follows


TEXTS = {
    PATCH: [
        ADDED,
        UPDATED,
        ADDED[:-1],
        ADDED + "x",
        UPDATED.replace("Begin", "Began"),
        "",
        "*** Begin Patch\n",
    ],
    SUMS: ["1", "1 + 2*(3)", '"a\\b" + (4', '"a\\b" + (4)', "1 +", '"a\nb"', " 1"],
    WORDS: ["abc\n", "no\n", "NO\t", "nob\t", '"x\ny"', "a\\\\\n", "a b", ""],
    LISTS: ["a;", "a;b;", ";", "", '"\n;'],
    as_lark("regex", r'[^"a-c]+\d{2}"(?i:x|\u{79})\.'): ['\\\n12"X.', 'd12"y.', 'c12"x.', 'd1"x.'],
    as_lark("regex", r"\S+[\s\S]\x41[[:alpha:]&&[^b]]?"): ["\\\nA", "a Ab", "a\x00Ac", " xA"],
    as_lark("regex", r".|\n\n"): ["\n", "\n\n", "\r", '"', "é", "ab"],
    as_lark("regex", r"(?s).{2}"): ["\n\n", '"\\', "ab", "a"],
}


@pytest.mark.parametrize("lark", TEXTS)
def test_the_escaped_texts_are_those_that_the_grammar_has(lark: str) -> None:
    plain, escaped = matching(lark), led(lark)
    for text in TEXTS[lark]:
        assert escaped(text) == plain(text), text
    assert len({plain(text) for text in TEXTS[lark]}) == 2


_CLASSES = ["a", '"', r"\\", r"\n", ".", r"[^a\n]", r'[\\"x]', r"\s", r"\W", r"[\x00-\x1f]", "(?i:K)"]
_PATTERNS = st.recursive(
    st.sampled_from(_CLASSES),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=2).map(lambda parts: f"(?:{'|'.join(parts)})"),
        st.tuples(inner, st.sampled_from("*+?")).map(lambda both: f"(?:{both[0]}){both[1]}"),
    ),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(pattern=_PATTERNS, text=st.text('ab"\\\n\t\x00kK\u212ax é', max_size=4))
def test_any_pattern_means_the_same_inside_of_json(pattern: str, text: str) -> None:
    lark = as_lark("regex", f"(?:{pattern})#")
    assert led(lark)(f"{text}#") == matching(lark)(f"{text}#")


@pytest.mark.parametrize("close", ["\n</parameter>", "</arg_value>", "</parameter>"])
def test_a_text_before_a_mark_is_led_as_it_is(close: str) -> None:
    follows = led(PATCH, in_json=False, close=close)
    assert follows(ADDED)
    assert follows(UPDATED)
    assert not follows(UPDATED + "x")
    # The mark ends the text wherever it stands.
    assert not follows(ADDED.replace("print", f"{close}print"))
    anything = led(as_lark("regex", "(?s:.*)"), in_json=False, close=close)
    assert anything("")
    assert anything("a\n<b\n")
    assert not anything(f"a{close}b")


def test_rules_that_lead_back_are_led_where_their_parts_end_by_themselves() -> None:
    follows = led(SUMS, in_json=False, close="</parameter>")
    assert follows('1 + ("a" * 2)')
    assert not follows("1 + (2")
    with pytest.raises(NotWritable, match="'<' with which the mark"):
        LedInput('start: "(" start ")" | /[^()]+/', 0, in_json=False, close="</parameter>")
    with pytest.raises(NotWritable, match="escape of JSON"):
        LedInput('start: "(" start ")" | /[^()\\n]+/ | "\\n"', 0, in_json=True, close='"}')


@pytest.mark.parametrize(
    ("lark", "named"),
    [
        ("start: %json {}", "%json"),
        ("start: <|tool|>", "<|tool|>"),
        ("start: @other", "@other"),
        ('start[stop="x"]: /a+/', "stop"),
        ('%llguidance {}\nstart: "a"', "%llguidance"),
        ("start: /(?x) a/", "flag x"),
        ("start: " + "(" * 70 + '"a"' + ")" * 70, "64 levels"),
    ],
)
def test_what_cannot_be_led_inside_of_a_call_is_named(lark: str, named: str) -> None:
    with pytest.raises(NotWritable) as refused:
        LedInput(lark, 0, in_json=True, close='"}')
    assert named in str(refused.value)
