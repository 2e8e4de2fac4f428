// Beneath an answer: tokens, cost and cached share; its waterfall, in which the time to the first token is a
// sum of named parts; and each token's probability with its alternatives.

import { button, el, table } from "./dom.js";
import { milliseconds, money, number, percent, t } from "./i18n.js";
import { store } from "./store.js";

const PARTS = ["network", "preprocess", "queue", "prefill", "first_decode", "deliberation", "serialize"];

/** Cost of a request as the ledger counts it, by prices for a million tokens. */
export function cost_of(usage, price) {
  if (!price) return 0;
  const cached = usage.prompt_tokens_details.cached_tokens;
  const nanos = (per_million) => Math.round(per_million * 1000);
  return ((usage.prompt_tokens - cached) * nanos(price.prompt) + cached * nanos(price.cached_prompt) + usage.completion_tokens * nanos(price.completion)) / 1e9;
}

/** Parts of the time to the first token: [[name, ms]], with what is left until this page saw it. */
export function parts_of(usage, seen_ms) {
  const parts = usage.time_to_first_token ?? {};
  // Only an answer that was chosen among several has that part.
  const known = PARTS.filter((name) => name !== "deliberation" || parts.deliberation_ms).map((name) => [name, parts[`${name}_ms`] ?? 0]);
  const rest = seen_ms === undefined ? 0 : Math.max(0, seen_ms - known.reduce((sum, [, ms]) => sum + ms, 0));
  return [...known, ["page", rest]];
}

/** The line of facts, the bar, and what opens beneath it. */
export function facts(message, prices) {
  const { usage } = message;
  if (!usage) return null;
  const { timings } = usage;
  const parts = parts_of(usage, message.seen_ms);
  const total = parts.reduce((sum, [, ms]) => sum + ms, 0);
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const price = prices[message.model] ?? prices[message.asked];
  const said = [
    total ? t("first_token", { ms: milliseconds(total) }) : null,
    timings?.tokens_per_second ? t("per_second", { count: number(timings.tokens_per_second, 0) }) : null,
    t("tokens_in", { count: number(usage.prompt_tokens) }),
    cached ? t("tokens_cached", { share: percent(cached / Math.max(usage.prompt_tokens, 1)) }) : null,
    t("tokens_out", { count: number(usage.completion_tokens) }),
    price ? t("cost", { cost: money(cost_of(usage, price)) }) : null,
  ];
  const place = el("div", { class: "details", hidden: true });
  const opens = (label, make) => {
    const made = button(label, () => {
      const was_open = made.getAttribute("aria-expanded") === "true";
      for (const other of made.parentElement.querySelectorAll("[aria-expanded]")) other.setAttribute("aria-expanded", "false");
      made.setAttribute("aria-expanded", String(!was_open));
      place.hidden = was_open;
      place.replaceChildren(...(was_open ? [] : make()));
      if (!was_open) place.scrollIntoView({ block: "nearest" });
    }, { "aria-expanded": "false" });
    return made;
  };
  return el(
    "div",
    { class: "about" },
    el("p", { class: "facts" }, said.filter(Boolean).map((each) => el("span", {}, each))),
    total ? bar(parts, total) : null,
    el("p", { class: "row" }, total ? opens(t("why"), () => waterfall(parts, total, timings)) : null, message.$logprobs?.length ? opens(t("tokens"), () => tokens_view(message.$logprobs)) : null),
    place,
  );
}

function bar(parts, total) {
  const label = parts.filter(([, ms]) => ms > 0).map(([name, ms]) => `${t(`part_${name}`)}: ${milliseconds(ms)}`).join(", ");
  const pieces = parts.filter(([, ms]) => ms > 0).map(([name, ms]) => {
    const piece = el("i", { class: `part-${name}` });
    piece.style.width = `${(100 * ms) / total}%`;
    return piece;
  });
  return el("div", { class: "bar", role: "img", "aria-label": label }, pieces);
}

function waterfall(parts, total, timings) {
  const rows = parts.map(([name, ms]) => [el("span", {}, el("span", { class: `swatch part-${name}` }), t(`part_${name}`)), milliseconds(ms)]);
  const made = table(t("why"), [t("part"), t("time")], [...rows, [t("part_sum"), milliseconds(total)]]);
  made.querySelector("tbody tr:last-child").className = "sum";
  const causes = Object.entries(timings?.delayed_by_ms ?? {}).filter(([, ms]) => ms > 0).sort(([, one], [, other]) => other - one);
  const delayed = causes.length
    ? `${t("delayed")}: ${causes.map(([cause, ms]) => `${t(`cause_${cause}`)} (${milliseconds(ms)})`).join(", ")}.`
    : t("delayed_none");
  const drafted = timings?.drafted_tokens ? el("p", { class: "hint" }, t("speculated", { accepted: number(timings.accepted_tokens), drafted: number(timings.drafted_tokens) })) : null;
  const own = timings?.delayed_by_requests ?? [];
  const whose = own.length ? el("p", { class: "hint" }, `${t("delayed_by_own")}: ${own.map(named).join("; ")}.`) : null;
  return [made, el("p", { class: "hint" }, delayed), ...[whose, drafted].filter(Boolean)];
}

// A request by its question, where this tab has asked it, and else by its id.
function named({ request_id, cause, overlap_ms }) {
  let said = request_id;
  for (const { messages } of store.list) {
    const at = messages.findIndex((each) => each.request?.endsWith(request_id));
    if (at > 0) said = `“${messages[at - 1].content.slice(0, 60)}”`;
  }
  return `${said} (${t(`cause_${cause}`)}, ${milliseconds(overlap_ms)})`;
}

const level = (probability) => (probability >= 0.8 ? "" : probability >= 0.4 ? "p1" : probability >= 0.1 ? "p2" : "p3");
const shown = (text) => JSON.stringify(text).slice(1, -1).replace(/^ | $/g, "␣");

function tokens_view(logprobs) {
  const detail = el("div", { "aria-live": "polite" }, el("p", { class: "hint" }, t("token_hint")));
  const spans = logprobs.map((each) => el("span", { class: level(Math.exp(each.logprob)) }, each.token));
  let at = -1;
  const choose = (index) => {
    if (index === at || index < 0 || index >= spans.length) return;
    spans[at]?.classList.remove("chosen");
    at = index;
    spans[at].classList.add("chosen");
    detail.replaceChildren(alternatives(logprobs[at]));
  };
  const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -Infinity, End: Infinity };
  const view = el("div", { class: "tokens", tabindex: "0", role: "application", "aria-label": `${t("tokens")}. ${t("token_hint")}`, on: {
    mouseover: (event) => choose(spans.indexOf(event.target)),
    keydown: (event) => {
      if (!(event.key in steps)) return;
      event.preventDefault();
      choose(Math.min(Math.max(at + steps[event.key], 0), spans.length - 1));
    },
  } }, spans);
  return [view, detail];
}

function alternatives(token) {
  const found = token.top_logprobs.some((each) => each.token === token.token) ? token.top_logprobs : [token, ...token.top_logprobs];
  const made = table(`${t("token")} “${shown(token.token)}”`, [t("token"), t("probability")], found.map((each) => [el("code", {}, shown(each.token)), percent(Math.exp(each.logprob))]));
  found.forEach((each, index) => {
    if (each.token === token.token) made.querySelectorAll("tbody tr")[index].className = "sum";
  });
  return made;
}
