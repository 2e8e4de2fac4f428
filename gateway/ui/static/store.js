// Conversations: in the tab always, and at the server where the tenant's are kept. What leaves and enters by
// files is checked field by field.

import { ApiError, call } from "./api.js";

const HERE = "millrace.conversations";
// Ids alone, which say nothing without a key of their tenant.
const THERE = "millrace.kept";
const AT_ONCE = 20;
export const FORMAT = "millrace-conversations";

export const store = { list: [], keeps: false };

const new_id = () => Array.from(crypto.getRandomValues(new Uint8Array(12)), (each) => each.toString(16).padStart(2, "0")).join("");

export const fresh = () => ({ id: new_id(), title: "", created: Date.now(), messages: [], kept: null, num_kept: 0, loaded: true });

/** Reads what the tab has, and finds what the server keeps. */
export async function open(keeps) {
  store.keeps = keeps;
  store.list = JSON.parse(sessionStorage.getItem(HERE) ?? "[]");
  if (!keeps) return;
  const known = new Set(store.list.map((each) => each.kept));
  const missing = kept_ids().filter((id) => !known.has(id));
  const found = await Promise.all(missing.map(describe));
  store.list.push(...found.filter(Boolean));
  store.list.sort((one, other) => other.created - one.created);
}

const kept_ids = () => JSON.parse(localStorage.getItem(THERE) ?? "[]");
const set_kept_ids = (ids) => localStorage.setItem(THERE, JSON.stringify(ids.slice(0, 200)));

async function describe(id) {
  try {
    const found = await call(`v1/conversations/${id}`);
    return { ...fresh(), title: found.metadata.title ?? "", created: found.created_at * 1000, kept: id, loaded: false };
  } catch (error) {
    // Of another tenant, or deleted.
    if (error instanceof ApiError) return null;
    throw error;
  }
}

/** Fetches the items of a conversation that the server has. */
export async function load(conversation) {
  if (conversation.loaded) return;
  const items = [];
  let after = "";
  for (;;) {
    const page = await call(`v1/conversations/${conversation.kept}/items?order=asc&limit=100${after && `&after=${after}`}`);
    items.push(...page.data);
    if (!page.has_more) break;
    after = page.last_id;
  }
  conversation.messages = messages_of(items);
  conversation.num_kept = conversation.messages.length;
  conversation.loaded = true;
  save();
}

/** Writes the tab's copy. Returns false where the browser has no room for it. */
export function save() {
  try {
    sessionStorage.setItem(HERE, JSON.stringify(store.list, (name, value) => (name.startsWith("$") ? undefined : value)));
    return true;
  } catch {
    return false;
  }
}

/** Sends the server what it lacks of a conversation. */
export async function keep(conversation) {
  if (!store.keeps) return;
  const lacking = conversation.messages.slice(conversation.num_kept).filter((message) => !message.cut && !message.error);
  if (!lacking.length) return;
  const items = lacking.flatMap(items_of);
  if (!conversation.kept) {
    const made = await call("v1/conversations", { method: "POST", body: { metadata: { title: conversation.title.slice(0, 200) } } });
    conversation.kept = made.id;
    set_kept_ids([made.id, ...kept_ids()]);
  }
  for (let at = 0; at < items.length; at += AT_ONCE) {
    const added = await call(`v1/conversations/${conversation.kept}/items`, { method: "POST", body: { items: items.slice(at, at + AT_ONCE) } });
    const last = lacking.at(-1);
    if (last.role === "assistant" && at + AT_ONCE >= items.length) last.kept_ids = added.data.map((item) => item.id).slice(-items_of(last).length);
  }
  conversation.num_kept = conversation.messages.length;
  save();
}

/** Takes the last message back, from the server too. */
export async function take_back(conversation) {
  const message = conversation.messages.pop();
  if (conversation.num_kept > conversation.messages.length) {
    conversation.num_kept = conversation.messages.length;
    for (const id of message.kept_ids ?? []) await call(`v1/conversations/${conversation.kept}/items/${id}`, { method: "DELETE" });
  }
  save();
}

export async function remove(conversation) {
  store.list = store.list.filter((each) => each !== conversation);
  save();
  if (!conversation.kept) return;
  set_kept_ids(kept_ids().filter((id) => id !== conversation.kept));
  await call(`v1/conversations/${conversation.kept}`, { method: "DELETE" });
}

/** Items of the Responses API for a message. */
export function items_of(message) {
  if (message.role === "tool") return [{ type: "function_call_output", call_id: message.tool_call_id, output: message.content }];
  const type = message.role === "assistant" ? "output_text" : "input_text";
  const said = message.content ? [{ type: "message", role: message.role, content: [{ type, text: message.content }] }] : [];
  const calls = (message.tool_calls ?? []).map((each) => ({ type: "function_call", call_id: each.id, name: each.function.name, arguments: each.function.arguments }));
  return [...said, ...calls];
}

/** Messages of items: calls belong to what the assistant said before them. */
export function messages_of(items) {
  const found = [];
  for (const item of items) {
    if (item.type === "message") {
      const content = typeof item.content === "string" ? item.content : item.content.map((part) => part.text ?? "").join("");
      found.push({ role: item.role, content, kept_ids: [item.id] });
    } else if (item.type === "function_call") {
      let last = found.at(-1);
      if (last?.role !== "assistant") found.push((last = { role: "assistant", content: "", kept_ids: [] }));
      (last.tool_calls ??= []).push({ id: item.call_id, type: "function", function: { name: item.name, arguments: item.arguments } });
      last.kept_ids.push(item.id);
    } else if (item.type === "function_call_output") {
      const content = typeof item.output === "string" ? item.output : item.output.map((part) => part.text ?? "").join("");
      found.push({ role: "tool", tool_call_id: item.call_id, content, kept_ids: [item.id] });
    }
  }
  return found;
}

/** The text of a file with all conversations that are loaded. */
export function exported() {
  const conversations = store.list.filter((each) => each.loaded).map(({ title, created, messages }) => ({ title, created, messages: messages.map(plain) }));
  return JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 2);
}

const FIELDS = { role: "string", content: "string", reasoning: "string", model: "string", tool_call_id: "string", finish: "string" };

// What of a message is text; nothing else is taken from a file.
function plain(message) {
  const kept = {};
  for (const [name, type] of Object.entries(FIELDS)) if (typeof message[name] === type) kept[name] = message[name];
  if (Array.isArray(message.tool_calls)) {
    kept.tool_calls = message.tool_calls.map((each) => ({
      id: String(each.id),
      type: "function",
      function: { name: String(each.function?.name), arguments: String(each.function?.arguments) },
    }));
  }
  if (message.usage && typeof message.usage === "object") kept.usage = message.usage;
  return kept;
}

/** Conversations of a file. Throws an Error whose message names what is wrong. */
export function imported(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("not_json");
  }
  if (file?.format !== FORMAT || !Array.isArray(file.conversations)) throw new Error("not_ours");
  return file.conversations.map((each) => {
    const messages = each?.messages;
    const is_right = Array.isArray(messages) && messages.every((message) => ["user", "assistant", "tool"].includes(message?.role) && typeof message.content === "string");
    if (!is_right) throw new Error("not_ours");
    return { ...fresh(), title: String(each.title ?? ""), created: Number(each.created) || Date.now(), messages: messages.map((message) => numbers_only(plain(message))) };
  });
}

// Usage of a file is shown as numbers: what is none is left out.
function numbers_only(message) {
  if (!message.usage) return message;
  const clean = (value) => {
    if (typeof value === "number") return Number.isFinite(value) ? value : 0;
    if (!value || typeof value !== "object") return undefined;
    return Object.fromEntries(Object.entries(value).map(([name, each]) => [name, clean(each)]).filter(([, each]) => each !== undefined));
  };
  return { ...message, usage: clean(message.usage) };
}
