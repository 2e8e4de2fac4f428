// The page: asks for the key, learns whose it is, and shows one view at a time.

import { ApiError, call, key } from "./api.js";
import * as chat from "./chat.js";
import * as compare from "./compare.js";
import { announce, button, by_id, download, el } from "./dom.js";
import { LANGUAGES, set_language, t } from "./i18n.js";
import * as operators from "./operators.js";
import { options } from "./options.js";
import { exported, imported, open, remove, save, store } from "./store.js";
import * as usage from "./usage.js";

const VIEWS = { chat, compare, usage, operators };
let account = null;

function view_name() {
  const wanted = location.hash.slice(1);
  return wanted in VIEWS && (wanted !== "operators" || account?.is_operator) ? wanted : "chat";
}

function draw() {
  for (const node of document.querySelectorAll("[data-t]")) node.textContent = t(node.dataset.t);
  const name = view_name();
  operators.leave();
  for (const link of document.querySelectorAll("[data-view]")) {
    if (link.dataset.view === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  by_id("view-title").textContent = t(name);
  document.title = `${t(name)} · Millrace`;
  by_id("operators-link").hidden = !account?.is_operator;
  if (!account) return;
  by_id("kept").textContent = t(store.keeps ? "kept_there" : "kept_here");
  VIEWS[name].show(by_id("view"), account);
  list();
}

function list() {
  by_id("conversations").replaceChildren(...store.list.map((each) => {
    const title = each.title || t("untitled");
    const chosen = button(title, () => pick(each), { "aria-current": each === chat.chat.current ? "true" : null });
    return el("li", {}, chosen, button("✕", () => drop(each), { class: "quiet delete", "aria-label": t("delete", { title }) }));
  }));
}

function pick(conversation) {
  close_menu();
  if (view_name() !== "chat") location.hash = "#chat";
  chat.choose(conversation);
}

async function drop(conversation) {
  if (conversation === chat.chat.current) await chat.choose(null);
  try {
    await remove(conversation);
  } catch (error) {
    announce(error.message);
  }
  list();
  by_id("new-conversation").focus();
}

function close_menu() {
  by_id("side").classList.remove("open");
  by_id("menu").setAttribute("aria-expanded", "false");
}

// --- the key --------------------------------------------------------------------------------------------------

function ask_key(problem = "") {
  by_id("key-error").textContent = problem;
  by_id("key-cancel").hidden = !account;
  if (!by_id("key-dialog").open) by_id("key-dialog").showModal();
  by_id("key-input").value = "";
  by_id("key-input").focus();
}

/** Uses the tab's key, or asks for one. */
async function enter() {
  if (!key.get()) return ask_key();
  try {
    const [found, models] = await Promise.all([call("v1/account"), call("v1/models")]);
    account = found;
    options.models = models.data;
    options.tiers = found.tiers;
    chat.chat.prices = found.prices;
    chat.chat.on_change = list;
    await open(found.keeps_conversations);
  } catch (error) {
    const is_key = error instanceof ApiError && error.status === 401;
    if (is_key) key.forget();
    return ask_key(error.message);
  }
  by_id("key-dialog").close();
  draw();
}

function start_key() {
  by_id("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    // Whoever has another key sees nothing of the one before.
    if (key.get() && key.get() !== by_id("key-input").value.trim()) {
      sessionStorage.clear();
      chat.chat.current = null;
    }
    key.set(by_id("key-input").value.trim());
    enter();
  });
  by_id("key-dialog").addEventListener("cancel", (event) => {
    if (!account) event.preventDefault();
  });
  by_id("key-cancel").addEventListener("click", () => by_id("key-dialog").close());
  by_id("change-key").addEventListener("click", () => ask_key());
}

// --- preferences, menu, files ---------------------------------------------------------------------------------

function start_preferences() {
  const language = set_language(localStorage.getItem("millrace.language") ?? navigator.languages.map((each) => each.slice(0, 2)).find((each) => LANGUAGES.includes(each)));
  document.documentElement.lang = language;
  by_id("language").value = language;
  by_id("language").addEventListener("change", (event) => {
    localStorage.setItem("millrace.language", event.target.value);
    document.documentElement.lang = set_language(event.target.value);
    draw();
  });
  const theme = (value) => {
    if (value) document.documentElement.dataset.theme = value;
    else delete document.documentElement.dataset.theme;
  };
  by_id("theme").value = localStorage.getItem("millrace.theme") ?? "";
  theme(by_id("theme").value);
  by_id("theme").addEventListener("change", (event) => {
    localStorage.setItem("millrace.theme", event.target.value);
    theme(event.target.value);
  });
}

function start_side() {
  by_id("menu").addEventListener("click", () => {
    const is_open = by_id("side").classList.toggle("open");
    by_id("menu").setAttribute("aria-expanded", String(is_open));
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && by_id("side").classList.contains("open")) {
      close_menu();
      by_id("menu").focus();
    }
  });
  addEventListener("hashchange", () => {
    close_menu();
    draw();
    by_id("main").focus();
  });
  by_id("new-conversation").addEventListener("click", () => {
    pick(null);
    by_id("ask")?.focus();
  });
}

function start_files() {
  by_id("export").addEventListener("click", () => download("millrace-conversations.json", exported()));
  by_id("import").addEventListener("click", () => by_id("import-file").click());
  by_id("import-file").addEventListener("change", async (event) => {
    const [file] = event.target.files;
    event.target.value = "";
    if (!file) return;
    try {
      const found = imported(await file.text());
      store.list.unshift(...found);
      by_id("kept").textContent = save() ? t("imported", { count: found.length }) : t("no_room");
    } catch (error) {
      by_id("kept").textContent = t(error.message);
    }
    announce(by_id("kept").textContent);
    list();
  });
}

start_preferences();
start_key();
start_side();
start_files();
draw();
enter();
