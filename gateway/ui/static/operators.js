// What runs now, for operators: the figures of `millrace top`, from what gateways say of themselves.

import { call } from "./api.js";
import { notice } from "./chat.js";
import { by_id, el, table } from "./dom.js";
import { milliseconds, money, number, percent, t } from "./i18n.js";
import { engine_rows, summary, tier_rows } from "./rates.js";

const EVERY_MS = 2000;
// A gateway that has not answered for so long is gone, or busy with others.
const FORGET_S = 30;
const seen = new Map();
let timer = 0;

export function show(place) {
  place.replaceChildren(el("div", { class: "page" }, el("h2", {}, t("operators_title")), el("div", { id: "now" }, el("p", { class: "hint" }, t("gathering")))));
  leave();
  look();
}

/** Stops looking. */
export function leave() {
  clearTimeout(timer);
  timer = 0;
}

async function look() {
  try {
    const after = await call("v1/status");
    const earlier = seen.get(after.gateway);
    seen.set(after.gateway, { at_ms: performance.now(), interval: earlier ? [earlier.interval[1], after] : [after, after] });
    for (const [name, each] of seen) if (performance.now() - each.at_ms > FORGET_S * 1000) seen.delete(name);
    if (earlier) by_id("now")?.replaceChildren(...drawn(after, earlier.interval[1]));
  } catch (error) {
    by_id("now")?.replaceChildren(notice(error.message, error.request));
  }
  if (by_id("now")) timer = setTimeout(document.hidden ? wait : look, EVERY_MS);
}

// A page that nobody sees asks for nothing.
function wait() {
  if (by_id("now")) timer = setTimeout(document.hidden ? wait : look, EVERY_MS);
}

const time = (seconds) => (seconds === null ? "–" : milliseconds(1000 * seconds));

function drawn(after, before) {
  const rows = tier_rows([...seen.values()].map((each) => each.interval));
  const sums = summary(rows, after.engines);
  const figures = [
    ["requests_s", number(sums.requests, 1)], ["tokens_s", number(sums.tokens)], ["active", number(sums.active)], ["waiting", number(sums.waiting)],
    ["refused_s", number(sums.refused, 1)], ["good_s", number(sums.good, 1)], ["cost_h", money(sums.cost_per_hour)],
  ];
  const tiers = table(t("tiers"), [t("tier"), t("active"), t("ttft_50"), t("ttft_95"), t("tpot_50"), t("met"), t("refused_s"), t("tokens_s"), t("good_s")], rows.map((row) => [
    row.name, number(row.active), time(row.ttft_p50), time(row.ttft_p95), time(row.tpot_p50), row.judged ? percent(row.met / row.judged) : "–", number(row.refused, 1), number(row.tokens), number(row.good, 1),
  ]));
  const list = table(t("engines"), [t("engine"), t("model"), t("state"), t("running"), t("waiting"), t("oldest"), t("kv"), t("hits"), t("step_50"), t("prefill_s"), t("decode_s"), t("preempted_s")], engine_rows(before, after).map((engine) => [
    engine.address, engine.model ?? "–", engine.state, number(engine.num_running), number(engine.num_waiting), milliseconds(1000 * engine.oldest_wait_s),
    engine.kv_usage === null ? "–" : percent(engine.kv_usage), engine.hits === null ? "–" : percent(engine.hits), time(engine.step_p50_s),
    number(engine.prefill_tokens_per_s), number(engine.decode_tokens_per_s), number(engine.preempted, 1),
  ]));
  return [
    el("dl", { class: "figures" }, figures.map(([name, text]) => el("div", {}, el("dt", {}, t(name)), el("dd", {}, text)))),
    tiers,
    list,
    el("p", { class: "hint" }, t("seen_from", { gateways: [...seen.keys()].join(", ") })),
  ];
}
