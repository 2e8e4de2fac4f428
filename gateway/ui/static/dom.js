// Elements without HTML: children are nodes, or strings that become text.

/** An element. `properties` are attributes, but for `on`: listeners by event; null and false leave one out. */
export function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "on") for (const [event, listener] of Object.entries(value)) made.addEventListener(event, listener);
    else if (value !== null && value !== false && value !== undefined) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

export const by_id = (id) => document.getElementById(id);

/** A button of the page. */
export function button(label, on_click, properties = {}) {
  return el("button", { type: "button", class: "quiet", ...properties, on: { click: on_click } }, label);
}

/** A table, which scrolls by itself where it is wider than the page. The first column is the row's head. */
export function table(caption, heads, rows) {
  const cells = (row) => row.map((cell, index) => el(index ? "td" : "th", index ? { class: "number" } : { scope: "row" }, cell));
  return el(
    "div",
    { class: "scrolls", tabindex: "0", role: "group", "aria-label": caption },
    el(
      "table",
      {},
      el("caption", {}, caption),
      el("thead", {}, el("tr", {}, ...heads.map((head, index) => el("th", { scope: "col", class: index ? "number" : null }, head)))),
      el("tbody", {}, ...rows.map((row) => el("tr", {}, ...cells(row)))),
    ),
  );
}

/** Tells a screen reader what has happened. */
export function announce(text) {
  by_id("status").textContent = text;
}

export function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
