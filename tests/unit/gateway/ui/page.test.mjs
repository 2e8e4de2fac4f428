// The page's parts that need no browser: Markdown, the test of votes, rates, words, files. `test_page_parts.py`
// runs it with node.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import test from "node:test";

const part = (name) => import(new URL(`../../../../gateway/ui/static/${name}.js`, import.meta.url));
globalThis.sessionStorage = { getItem: () => null, setItem: () => {}, removeItem: () => {} };
const { inline, parse, safe_url } = await part("markdown");
const { interval, judge } = await part("sequential");
const { engine_rows, percentile, tier_rows } = await part("rates");
const { LANGUAGES, words_of } = await part("i18n");
const { exported, imported, items_of, messages_of, store } = await part("store");
const { cost_of, parts_of } = await part("answer");

const types = (text) => parse(text).map((block) => block.type);
const plain = (spans) => spans.map((span) => span.text ?? (span.children ? plain(span.children) : "")).join("");

test("blocks are told apart", () => {
  assert.deepEqual(types("# Title\n\ntext\nmore\n\n> said\n\n---\n\n- a\n- b\n\n1. one"), ["heading", "paragraph", "quote", "rule", "list", "list"]);
  assert.deepEqual(types("| a | b |\n|---|--:|\n| 1 | 2 |"), ["table"]);
  const [list] = parse("- a\n  - b\n- c");
  assert.equal(list.items.length, 2);
  assert.equal(list.items[0][1].type, "list");
  const [loose] = parse("1. a\n\n   still a\n\n2. b");
  assert.equal(loose.items.length, 2);
});

test("code is kept as it is, also while it is being written", () => {
  const [code] = parse("```python\nif a < b:\n    print('*x*')\n```\n");
  assert.deepEqual(code, { type: "code", language: "python", text: "if a < b:\n    print('*x*')" });
  assert.equal(parse("```js\nlet a = 1;")[0].text, "let a = 1;");
  assert.equal(parse("````\n```\n````")[0].text, "```");
});

test("spans", () => {
  assert.deepEqual(inline("a **b** *c* `d*` ~~e~~").map((span) => span.type), ["text", "strong", "text", "em", "text", "code", "text", "strike"]);
  assert.equal(plain(inline("snake_case_name and 2 * 3 * 4")), "snake_case_name and 2 * 3 * 4");
  assert.deepEqual(inline("snake_case_name").map((span) => span.type), ["text"]);
  assert.equal(plain(inline("\\*no\\*")), "*no*");
  assert.equal(inline("[x](https://a.example/b_(c))")[0].href, "https://a.example/b_(c)");
});

test("nothing that could run becomes a link", () => {
  for (const target of ["javascript:alert(1)", "JaVaScRiPt:alert(1)", "data:text/html,x", "vbscript:x", "//evil.example", "file:///etc/passwd", "java\nscript:x"]) {
    assert.equal(safe_url(target), "", target);
    assert.ok(inline(`[x](${target})`).every((span) => span.type !== "link"), target);
  }
  // Images of other hosts would tell them who reads: they become links.
  assert.equal(inline("![alt](https://a.example/x.png)")[0].type, "link");
  // HTML is text.
  assert.deepEqual(parse("<script>alert(1)</script>")[0].children, [{ type: "text", text: "<script>alert(1)</script>" }]);
});

test("hostile texts come to an end", { timeout: 60_000 }, () => {
  for (const piece of ["[", "*a ", "`", "**", "> ", "- ", "![", "_a ", "<http://", "~~", "| a "]) {
    // They take minutes where an end is looked for without a bound.
    assert.ok(parse(piece.repeat(20000)).length > 0, piece);
  }
});

test("every character of plain text survives", () => {
  const text = "a ** b * c _ d ` e [f] (g) <h> ~ i ~~ j ! k";
  assert.equal(plain(inline(text)), text);
});

test("votes decide when the evidence is there, and not before", () => {
  assert.equal(judge(0, 0).verdict, "open");
  assert.equal(judge(5, 0).verdict, "open");
  assert.equal(judge(9, 0).verdict, "first");
  assert.equal(judge(0, 9).verdict, "second");
  assert.equal(judge(400, 400).verdict, "equal");
  const [low, high] = interval(30, 10);
  assert.ok(low > 0.5 && low < 0.75 && high > 0.75 && high < 1);
  // 1/4 * 2^2: three outcomes of two votes weigh alike.
  assert.ok(Math.abs(judge(2, 0).evidence - 4 / 3) < 1e-9);
});

test("looking after every vote does not decide among equals more often than one time in twenty", () => {
  let state = 12345;
  const coin = () => ((state = (Math.imul(state, 1664525) + 1013904223) >>> 0), state >>> 31);
  let wrong = 0;
  const runs = 1000;
  for (let run = 0; run < runs; run += 1) {
    const votes = [0, 0];
    for (let vote = 0; vote < 200; vote += 1) {
      votes[coin()] += 1;
      const { verdict } = judge(...votes);
      if (verdict === "first" || verdict === "second") {
        wrong += 1;
        break;
      }
    }
  }
  assert.ok(wrong / runs <= 0.05, `${wrong} of ${runs}`);
});

test("rates and percentiles are those of two readings", () => {
  const none = [[0.1, 0], [0.2, 0], [null, 0]];
  assert.equal(percentile(none, none, 0.5), null);
  assert.equal(percentile(none, [[0.1, 0], [0.2, 10], [null, 10]], 0.5), 0.15000000000000002);
  assert.equal(percentile(none, [[0.1, 0], [0.2, 0], [null, 4]], 0.5), 0.2);
  const tier = { name: "standard", active: 3, num_requests: 10, num_refused: 0, num_judged: 4, num_met: 2, num_good: 1, completion_tokens: 100, cost: 1, ttft_buckets: none, tpot_buckets: none };
  const before = { at_s: 1, tiers: [tier] };
  const after = { at_s: 3, tiers: [{ ...tier, num_requests: 14, completion_tokens: 20 }] };
  const [row] = tier_rows([[before, after]]);
  assert.equal(row.requests, 2);
  // A restart counts from zero.
  assert.equal(row.tokens, 10);
  assert.equal(row.active, 3);
});

test("engines show what they counted between two readings", () => {
  const engine = { address: "a", step_p50_s: 0.01, prefix_queried_tokens: 100, prefix_hit_tokens: 10, num_preemptions: 4 };
  const now = { ...engine, prefix_queried_tokens: 200, prefix_hit_tokens: 60, num_preemptions: 5 };
  const rows = engine_rows({ at_s: 1, engines: [engine] }, { at_s: 3, engines: [now, { ...engine, address: "b" }] });
  assert.deepEqual([rows[0].hits, rows[0].preempted, rows[0].step_p50_s], [0.5, 0.5, 0.01]);
  // One that was not there before has counted nothing since.
  assert.deepEqual([rows[1].hits, rows[1].preempted], [null, 0]);
});

test("every language has every word, with the same places", () => {
  const places = (text) => (text.match(/\{\w+\}/g) ?? []).sort().join();
  const english = words_of("en");
  for (const language of LANGUAGES) {
    assert.deepEqual(Object.keys(words_of(language)).sort(), Object.keys(english).sort());
    for (const [name, text] of Object.entries(words_of(language))) assert.equal(places(text), places(english[name]), `${language}: ${name}`);
  }
  const used = ["app", "chat", "compare", "usage", "operators", "options", "answer", "store"].flatMap((name) => {
    const text = readFileSync(new URL(`../../../../gateway/ui/static/${name}.js`, import.meta.url), "utf8");
    return [...text.matchAll(/\bt\("(\w+)"/g)].map((found) => found[1]);
  });
  const page = readFileSync(new URL("../../../../gateway/ui/static/index.html", import.meta.url), "utf8");
  used.push(...[...page.matchAll(/data-t="(\w+)"/g)].map((found) => found[1]));
  for (const name of used) assert.ok(name in english, name);
});

test("what is exported comes back, and nothing else is taken", () => {
  const messages = [{ role: "user", content: "hi" }, { role: "assistant", content: "ho", reasoning: "hm", model: "m", $logprobs: [1] }];
  store.list = [{ title: "one", created: 5, messages, loaded: true, kept: "conv_1", num_kept: 2 }];
  const [back] = imported(exported());
  assert.deepEqual(back.messages, [{ role: "user", content: "hi" }, { role: "assistant", content: "ho", reasoning: "hm", model: "m" }]);
  assert.equal(back.kept, null);
  assert.throws(() => imported("{"), /not_json/);
  assert.throws(() => imported("{}"), /not_ours/);
  assert.throws(() => imported(JSON.stringify({ format: "millrace-conversations", conversations: [{ messages: [{ role: "system", content: {} }] }] })), /not_ours/);
});

test("messages become items and items messages", () => {
  const call = { id: "c1", type: "function", function: { name: "add", arguments: "{}" } };
  const messages = [{ role: "user", content: "hi" }, { role: "assistant", content: "", tool_calls: [call] }, { role: "tool", tool_call_id: "c1", content: "3" }, { role: "assistant", content: "3" }];
  const items = messages.flatMap(items_of).map((item, index) => ({ ...item, id: `i${index}` }));
  assert.deepEqual(messages_of(items).map(({ kept_ids, ...rest }) => rest), messages);
});

test("an answer's parts add up, and its cost is the ledger's", () => {
  const usage = { prompt_tokens: 10, completion_tokens: 4, prompt_tokens_details: { cached_tokens: 6 }, time_to_first_token: { network_ms: 1, preprocess_ms: 2, queue_ms: 3, prefill_ms: 4, first_decode_ms: 5, deliberation_ms: 7, serialize_ms: 6, total_ms: 28 } };
  assert.equal(parts_of(usage).reduce((sum, [, ms]) => sum + ms, 0), usage.time_to_first_token.total_ms);
  assert.ok(!parts_of({ ...usage, time_to_first_token: { ...usage.time_to_first_token, deliberation_ms: 0 } }).some(([name]) => name === "deliberation"));
  assert.equal(parts_of(usage, 30).reduce((sum, [, ms]) => sum + ms, 0), 30);
  assert.equal(parts_of(usage, 5).at(-1)[1], 0);
  assert.equal(cost_of(usage, { prompt: 2, cached_prompt: 1, completion: 3 }), (4 * 2 + 6 + 12) / 1e6);
});
