// Two models answer the same questions side by side, blind; votes go into a test that may be looked at always.

import { announce, button, by_id, el } from "./dom.js";
import { generate } from "./generation.js";
import { number, percent, t } from "./i18n.js";
import { render } from "./markdown.js";
import { notice } from "./chat.js";
import { FieldError, all_models, request } from "./options.js";
import { judge } from "./sequential.js";

const KEPT = "millrace.votes";
const SIDES = ["left", "right"];
const state = { models: [], votes: [], reveals: false, order: null, running: null, ...JSON.parse(sessionStorage.getItem(KEPT) ?? "{}") };

const save = () => sessionStorage.setItem(KEPT, JSON.stringify({ models: state.models, votes: state.votes, reveals: state.reveals }));

export function show(place) {
  const known = all_models();
  const defaults = [known[0] ?? "", known[1] ?? known[0] ?? ""];
  state.models = [0, 1].map((index) => (known.includes(state.models[index]) ? state.models[index] : defaults[index]));
  const pick = (index) => {
    const made = el("select", { id: `compare-${index}`, on: { change: () => {
      state.models[index] = made.value;
      // Votes are about two models: others begin anew.
      restart();
    } } }, known.map((id) => el("option", { value: id, selected: id === state.models[index] }, id)));
    return el("label", {}, t(index ? "model_b" : "model_a"), made);
  };
  const ask = el("textarea", { id: "compare-ask", rows: 2, "aria-label": t("message"), placeholder: t("message"), on: { keydown: (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      start();
    }
  } } });
  place.replaceChildren(el("div", { class: "page" },
    el("h2", {}, t("compare_title")),
    el("p", { class: "hint" }, t("compare_hint")),
    el("div", { class: "choices" }, pick(0), pick(1)),
    ask,
    el("p", { class: "row" }, button(t("ask_both"), start, { class: "primary", id: "ask-both" }), button(t("stop"), () => state.running?.abort(), { class: "", id: "stop-both", hidden: true })),
    el("div", { id: "compare-problem" }),
    el("div", { class: "sides", id: "sides" }),
    el("div", { id: "vote" }),
    el("div", { id: "verdict" }),
  ));
  verdict();
}

async function start() {
  const text = by_id("compare-ask").value.trim();
  if (!text || state.running) return;
  by_id("compare-problem").replaceChildren();
  const is_swapped = crypto.getRandomValues(new Uint8Array(1))[0] % 2 === 1;
  state.order = is_swapped ? [1, 0] : [0, 1];
  let bodies;
  try {
    bodies = state.order.map((index) => request([{ role: "user", content: text }], state.models[index]));
  } catch (error) {
    if (!(error instanceof FieldError)) throw error;
    by_id("compare-problem").replaceChildren(notice(error.message));
    return;
  }
  state.running = new AbortController();
  busy(true);
  by_id("vote").replaceChildren();
  announce(t("answering"));
  const messages = SIDES.map(() => ({ role: "assistant", content: "" }));
  const panes = SIDES.map((side) => el("section", { class: "side", "aria-label": t(side) }, el("h3", {}, t(side)), el("div", { class: "text working" })));
  by_id("sides").replaceChildren(...panes);
  await Promise.all(messages.map((message, index) => generate(bodies[index], message, { signal: state.running.signal, changed: () => draw(panes[index], message) })));
  state.running = null;
  busy(false);
  const is_whole = messages.every((message) => !message.error && !message.cut && !message.stopped);
  if (is_whole && by_id("vote")) ask_vote();
  announce(t(is_whole ? "vote" : "stopped"));
}

function busy(is_busy) {
  if (!by_id("ask-both")) return;
  by_id("ask-both").disabled = is_busy;
  by_id("stop-both").hidden = !is_busy;
}

// Neither name nor time is shown: both would tell who it is.
function draw(pane, message) {
  const text = pane.querySelector(".text");
  text.classList.toggle("working", state.running !== null && !message.content);
  text.replaceChildren(render(message.content, { copy: t("copy") }));
  if (message.error) text.append(notice(message.error.message, message.error.request));
  if (message.cut) text.append(notice(t("cut")));
}

function ask_vote() {
  const votes = [["better_left", 0], ["tie", null], ["better_right", 1]];
  by_id("vote").replaceChildren(
    el("h3", { id: "vote-title", tabindex: "-1" }, t("vote")),
    el("p", { class: "row", role: "group", "aria-labelledby": "vote-title" }, votes.map(([name, side]) => button(t(name), () => cast(side), { class: "" }))),
  );
  by_id("vote-title").focus();
}

function cast(side) {
  state.votes.push(side === null ? null : state.order[side]);
  save();
  by_id("vote").replaceChildren();
  verdict();
  by_id("compare-ask").focus();
}

function restart() {
  Object.assign(state, { votes: [], reveals: false });
  save();
  by_id("sides").replaceChildren();
  by_id("vote").replaceChildren();
  verdict();
}

function verdict() {
  const wins = state.votes.filter((vote) => vote === 0).length;
  const losses = state.votes.filter((vote) => vote === 1).length;
  const found = judge(wins, losses);
  const [one, other] = state.models;
  const shows = state.reveals || found.verdict !== "open";
  const text = { open: t("open"), equal: t("equal"), first: t("winner", { model: one }), second: t("winner", { model: other }) }[found.verdict];
  by_id("verdict").replaceChildren(
    one === other ? el("p", { class: "hint" }, t("two_models")) : "",
    el("p", { role: "status" }, el("strong", {}, text)),
    el("p", { class: "hint" }, `${t("votes", { count: state.votes.length, ties: state.votes.length - wins - losses })}; ${t("evidence", { evidence: number(Math.min(found.evidence, 1e6), 2), needed: found.needed })}`),
    shows && state.votes.length ? el("p", {}, t("score", { model: one, other, wins, losses, low: percent(found.low), high: percent(found.high) })) : "",
    el("p", { class: "row" },
      shows || !state.votes.length ? null : button(t("reveal"), () => { state.reveals = true; save(); verdict(); }, { class: "" }),
      state.votes.length ? button(t("start_over"), restart) : null),
  );
}
