// The conversation: what was said, the composer, and what can be done with the last answer.

import { facts } from "./answer.js";
import { ApiError } from "./api.js";
import { announce, button, by_id, el } from "./dom.js";
import { as_asked, generate } from "./generation.js";
import { t } from "./i18n.js";
import { render } from "./markdown.js";
import { FieldError, choices, model_name, panel, request, show_error } from "./options.js";
import { fresh, keep, load, save, store, take_back } from "./store.js";

// Longer texts are drawn less often while they grow.
const SLOW_CHARACTERS = 8000;
const SLOW_MS = 150;

export const chat = { current: null, running: null, prices: {}, on_change: () => {} };

/** Draws the view into `place`. */
export function show(place) {
  const ask = el("textarea", { id: "ask", rows: 1, "aria-label": t("message"), placeholder: t("message"), on: { keydown: (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  } } });
  const row = el("div", { class: "choices" });
  const opens = button(t("options"), () => toggle_options(opens), { id: "open-options", "aria-expanded": "false", "aria-controls": "options-place" });
  const redraw = () => row.replaceChildren(...choices(redraw).filter(Boolean), opens);
  redraw();
  place.replaceChildren(
    el("div", { class: "log", id: "log", tabindex: "0", role: "group", "aria-label": t("conversations") }),
    el("form", { class: "composer", novalidate: true, on: { submit: (event) => (event.preventDefault(), send()) } },
      el("div", { id: "options-place", hidden: true }),
      row,
      el("div", { id: "problem" }),
      el("div", { class: "ask" }, ask, el("button", { type: "submit", class: "primary", id: "send" }, t("send")), button(t("stop"), stop, { id: "stop", class: "", hidden: true })),
    ),
  );
  draw();
  running(chat.running !== null);
  if (matchMedia("(min-width: 46rem)").matches) ask.focus();
}

function toggle_options(opens) {
  const place = by_id("options-place");
  place.hidden = !place.hidden;
  opens.setAttribute("aria-expanded", String(!place.hidden));
  place.replaceChildren(...(place.hidden ? [] : [panel()]));
}

/** Opens a conversation, or a new one. */
export async function choose(conversation) {
  stop();
  chat.current = conversation ?? fresh();
  chat.on_change();
  draw();
  if (chat.current.loaded) return;
  try {
    await load(chat.current);
    draw();
  } catch (error) {
    problem(error);
  }
}

/** Ends the answer that is being written. */
export function stop() {
  chat.running?.abort();
}

async function send() {
  const ask = by_id("ask");
  const text = ask.value.trim();
  if (!text || chat.running) return;
  const conversation = (chat.current ??= fresh());
  const question = { role: "user", content: text };
  // Nothing is asked with fields that cannot be sent.
  const body = checked([...conversation.messages, question]);
  if (!body) return;
  if (!store.list.includes(conversation)) store.list.unshift(conversation);
  conversation.title ||= text.split("\n")[0].slice(0, 80);
  conversation.messages.push(question);
  ask.value = "";
  await answer(conversation, body, { role: "assistant", content: "" });
}

// The body of a request, or null where a field is wrong, which is then said there.
function checked(messages, more = {}) {
  problem(null);
  try {
    return { ...request(as_asked(messages)), ...more };
  } catch (error) {
    if (!(error instanceof FieldError)) throw error;
    if (by_id("options-place").hidden) by_id("open-options").click();
    show_error(error.field, error.message);
    return null;
  }
}

// From here on nothing else is asked, however often a button is pressed.
function begin() {
  chat.running = new AbortController();
  running(true);
}

async function answer(conversation, body, message, { goes_on = false } = {}) {
  if (!chat.running) begin();
  if (!goes_on) conversation.messages.push(message);
  chat.on_change();
  announce(t("answering"));
  draw();
  await generate(body, message, { signal: chat.running.signal, changed: later(() => draw_last(message)) });
  chat.running = null;
  running(false);
  announce(message.error?.message ?? t(message.cut ? "cut" : message.stopped ? "stopped" : "answered"));
  if (message.error) show_error(message.error.param ?? "", message.error.message);
  if (!save()) problem(new Error(t("no_room")));
  if (chat.current === conversation) draw();
  try {
    await keep(conversation);
  } catch (error) {
    problem(error);
  }
  chat.on_change();
}

// Calls the function once in a frame, or less often as `draw_last` asks.
function later(draw_now) {
  let is_due = false;
  return () => {
    if (is_due) return;
    is_due = true;
    const wait = (chat.current?.messages.at(-1)?.content.length ?? 0) > SLOW_CHARACTERS ? (then) => setTimeout(then, SLOW_MS) : requestAnimationFrame;
    wait(() => {
      is_due = false;
      draw_now();
    });
  };
}

function running(is_running) {
  if (!by_id("send")) return;
  const had_focus = [by_id("send"), by_id("stop")].includes(document.activeElement);
  by_id("send").hidden = is_running;
  by_id("stop").hidden = !is_running;
  if (had_focus) by_id(is_running ? "stop" : "ask").focus();
}

function problem(error) {
  const place = by_id("problem");
  if (!place) return;
  place.replaceChildren(...(error ? [notice(error.message, error instanceof ApiError ? error.request : "")] : []));
}

export function notice(text, request = "", ...buttons) {
  const id = request ? el("p", { class: "hint" }, t("request", { id: request })) : null;
  return el("div", { class: "notice", role: "alert" }, el("p", {}, text), id, buttons.length ? el("p", { class: "row" }, buttons) : null);
}

// --- drawing --------------------------------------------------------------------------------------------------

function draw() {
  const log = by_id("log");
  if (!log) return;
  const messages = chat.current?.messages ?? [];
  if (!messages.length) {
    log.replaceChildren(el("div", { class: "welcome" }, el("h2", {}, t("welcome")), el("p", {}, t("welcome_hint"))));
    return;
  }
  log.replaceChildren(el("ol", { class: "messages" }, messages.filter((message) => message.role !== "tool").map(message_node)));
  log.scrollTop = log.scrollHeight;
}

function draw_last(message) {
  const log = by_id("log");
  // A frame that comes after the end would take the focus from what has been drawn there.
  if (!log || !chat.running || chat.current?.messages.at(-1) !== message) return;
  const is_at_end = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  const last = log.querySelector(".messages")?.lastElementChild;
  const was_open = last?.querySelector("details.thoughts")?.open ?? false;
  const made = message_node(message);
  if (was_open) made.querySelector("details.thoughts")?.setAttribute("open", "");
  last?.replaceWith(made);
  if (is_at_end) log.scrollTop = log.scrollHeight;
}

function message_node(message) {
  if (message.role === "user") {
    return el("li", { class: "message user" }, el("h2", {}, t("you")), el("div", { class: "text" }, message.content));
  }
  const is_last = message === chat.current.messages.findLast((each) => each.role === "assistant");
  const is_running = is_last && chat.running !== null;
  const text = el("div", { class: `text ${is_running && !message.content ? "working" : ""}` });
  text.append(render(message.content, { copy: t("copy") }));
  return el(
    "li",
    { class: "message assistant" },
    el("h2", {}, message.model ?? message.asked ?? model_name()),
    message.reasoning ? thoughts(message, is_running) : null,
    message.content || is_running ? text : null,
    message.tool_calls ? calls(message, is_last && !is_running) : null,
    is_running ? null : ending(message, is_last),
    is_running ? null : facts(message, chat.prices),
  );
}

function thoughts(message, is_running) {
  const is_thinking = is_running && !message.content;
  const text = el("div", { class: "text" });
  text.append(render(message.reasoning, { copy: t("copy") }));
  return el("details", { class: "thoughts" }, el("summary", { class: is_thinking ? "working" : null }, t(is_thinking ? "thinking" : "thoughts")), text);
}

function ending(message, is_last) {
  const again = button(t("retry"), retry, { class: "" });
  const on = button(t("continue"), go_on, { class: "" });
  const can_go_on = message.content && !message.tool_calls;
  // What had come of an answer is worth going on from, whatever ended it.
  const ways = is_last ? [can_go_on ? on : null, again].filter(Boolean) : [];
  if (message.error) return notice(message.error.message, message.error.request, ...ways);
  if (message.cut) return notice(t("cut"), "", ...ways);
  if (!is_last) return null;
  const said = message.stopped ? t("stopped") : message.finish === "length" ? t("length") : "";
  return el("p", { class: "row" }, said ? el("span", { class: "hint" }, said) : null, said && can_go_on ? on : null, button(t("retry"), retry));
}

async function retry() {
  const conversation = chat.current;
  if (chat.running) return;
  const body = checked(conversation.messages.slice(0, -1));
  if (!body) return;
  begin();
  try {
    await take_back(conversation);
  } catch (error) {
    problem(error);
  }
  await answer(conversation, body, { role: "assistant", content: "" });
}

async function go_on() {
  const conversation = chat.current;
  const message = conversation.messages.at(-1);
  if (chat.running) return;
  const body = checked(conversation.messages, { continue_final_message: true });
  if (!body) return;
  begin();
  // What the server keeps of it is replaced by the whole.
  if (conversation.num_kept === conversation.messages.length) {
    await take_back(conversation).catch(problem);
    conversation.messages.push(message);
  }
  delete message.seen_ms;
  delete message.usage;
  await answer(conversation, body, message, { goes_on: true });
}

function calls(message, is_last) {
  const results = new Map();
  for (const each of chat.current.messages) if (each.role === "tool") results.set(each.tool_call_id, each.content);
  const fields = [];
  const nodes = message.tool_calls.filter(Boolean).map((call) => {
    const { name } = call.function;
    const given = results.get(call.id);
    const label = t("result_of", { name });
    const field = el("textarea", { rows: 2, class: "json", "aria-label": label, placeholder: label });
    if (given === undefined) fields.push([call, field]);
    return el("div", { class: "call" }, el("h3", {}, t("call", { name })), el("pre", { tabindex: "0" }, el("code", {}, pretty(call.function.arguments))),
      given !== undefined ? el("div", {}, el("p", { class: "hint" }, label), el("pre", { tabindex: "0" }, el("code", {}, given))) : is_last ? field : null);
  });
  const gives = button(t("give_results"), () => give(fields), { class: "" });
  return el("div", {}, nodes, is_last && fields.length ? el("p", { class: "row" }, gives) : null);
}

async function give(fields) {
  const conversation = chat.current;
  if (chat.running) return;
  const results = fields.map(([call, field]) => ({ role: "tool", tool_call_id: call.id, content: field.value }));
  const body = checked([...conversation.messages, ...results]);
  if (!body) return;
  conversation.messages.push(...results);
  await answer(conversation, body, { role: "assistant", content: "" });
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
