// What the key's tenant has used since the first of the month.

import { call } from "./api.js";
import { notice } from "./chat.js";
import { by_id, el, table } from "./dom.js";
import { money, number, t } from "./i18n.js";

const GROUPS = ["day", "model", "tier", "key", "adapter", "path", "outcome"];
const FIELDS = ["num_requests", "computed_prompt_tokens", "cached_prompt_tokens", "completion_tokens"];

export function show(place, account) {
  const by = el("select", { id: "usage-by", on: { change: () => fill(by.value) } }, GROUPS.map((each) => el("option", { value: each }, t(`by_${each}`))));
  place.replaceChildren(el("div", { class: "page" },
    el("h2", {}, t("usage_title", { tenant: account.tenant })),
    el("p", { class: "hint" }, t("usage_since")),
    el("div", { class: "choices" }, el("label", {}, t("by"), by)),
    el("div", { id: "usage-table" }),
  ));
  return fill("day");
}

async function fill(by) {
  let shown;
  try {
    shown = drawn(await call(`v1/usage?by=${by}`), by);
  } catch (error) {
    shown = [notice(error.message, error.request)];
  }
  by_id("usage-table")?.replaceChildren(...shown);
}

function drawn(usage, by) {
  if (!usage.is_kept) return [el("p", {}, t("no_ledger"))];
  if (!usage.data.length) return [el("p", {}, t("nothing"))];
  const row = (head, sums) => [head, ...FIELDS.map((name) => number(sums[name])), money(sums.cost)];
  const total = usage.data.reduce((sums, each) => Object.fromEntries([...FIELDS, "cost"].map((name) => [name, (sums[name] ?? 0) + each[name]])), {});
  const figures = [["requests", number(total.num_requests)], ["completion", number(total.completion_tokens)], ["cost_head", money(total.cost)]];
  const made = table(t("usage"), [t(`by_${by}`), t("requests"), t("prompt_computed"), t("prompt_cached"), t("completion"), t("cost_head")], [...usage.data.map((each) => row(each.group || "–", each)), row(t("sum"), total)]);
  made.querySelector("tbody tr:last-child").className = "sum";
  return [el("dl", { class: "figures" }, figures.map(([name, text]) => el("div", {}, el("dt", {}, t(name)), el("dd", {}, text)))), made];
}
