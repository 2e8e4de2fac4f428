// What a question is asked with: model, adapter, tier, sampling, tools, schema. Fields are kept for the tab.

import { el } from "./dom.js";
import { t } from "./i18n.js";

const KEPT = "millrace.options";
const NUMBERS = {
  temperature: { min: 0, max: 2, step: 0.05 }, top_p: { min: 0, max: 1, step: 0.01 }, top_k: { min: 0, step: 1 }, min_p: { min: 0, max: 1, step: 0.01 },
  max_tokens: { min: 1, step: 1 }, seed: { step: 1 }, presence_penalty: { min: -2, max: 2, step: 0.1 },
  frequency_penalty: { min: -2, max: 2, step: 0.1 }, repetition_penalty: { min: 0.01, max: 2, step: 0.01 }, max_thinking_tokens: { min: 1, step: 1 },
};
// The words of fields that the API calls otherwise.
const PARAMETERS = { response_format: "schema", service_tier: "tier", stop: "stop_texts", messages: "system" };

/** The choices of the page, and what the server offers. */
export const options = { values: { logprobs: true, ...JSON.parse(sessionStorage.getItem(KEPT) ?? "{}") }, models: [], tiers: [] };

const set = (name, value) => {
  options.values[name] = value;
  sessionStorage.setItem(KEPT, JSON.stringify(options.values));
};

/** Models that generate, without those that are adapters of another. */
export const base_models = () => options.models.filter((model) => model.tasks.includes("generate") && !base_of(model.id)).map((model) => model.id);
export const all_models = () => options.models.filter((model) => model.tasks.includes("generate")).map((model) => model.id);

function base_of(name) {
  const at = name.lastIndexOf(":");
  return at > 0 && options.models.some((model) => model.id === name.slice(0, at)) ? name.slice(0, at) : "";
}

const adapters_of = (base) => options.models.map((model) => model.id).filter((id) => base_of(id) === base);

/** The name that a question is asked with. */
export function model_name() {
  const { model, adapter } = options.values;
  const base = base_models().includes(model) ? model : (base_models()[0] ?? "");
  return adapters_of(base).includes(adapter) ? adapter : base;
}

function select(name, pairs, value, on_change) {
  const made = el("select", { id: `option-${name}`, on: { change: () => on_change(made.value) } }, pairs.map(([key, label]) => el("option", { value: key, selected: key === value }, label)));
  return made;
}

/** The row of model, adapter and tier. `redraw` is called when one changes what the others offer. */
export function choices(redraw) {
  const base = base_models().includes(options.values.model) ? options.values.model : (base_models()[0] ?? "");
  const adapters = adapters_of(base);
  const labelled = (name, control) => el("label", {}, t(name), control);
  return [
    labelled("model", select("model", base_models().map((id) => [id, id]), base, (value) => (set("model", value), redraw()))),
    adapters.length ? labelled("adapter", select("adapter", [["", t("none")], ...adapters.map((id) => [id, id.slice(base.length + 1)])], options.values.adapter, (value) => set("adapter", value))) : null,
    options.tiers.length > 1
      ? labelled("tier", select("tier", [["", t("own_tier")], ...options.tiers.map((tier) => [tier.service_tier, tier.name])], options.values.tier, (value) => set("tier", value)))
      : null,
  ];
}

function field(name, control) {
  const error = el("p", { class: "error", id: `error-${name}` });
  control.id = `option-${name}`;
  control.setAttribute("aria-describedby", error.id);
  return el("div", { class: `field ${control.tagName === "TEXTAREA" ? "wide" : ""}` }, el("label", { for: control.id }, t(name)), control, error);
}

function area(name, rows, properties = {}) {
  const made = el("textarea", { rows, spellcheck: "false", ...properties, on: { input: () => (set(name, made.value), show_error(name, "")) } });
  made.value = options.values[name] ?? "";
  return field(name, made);
}

function numeric(name) {
  const model = options.models.find((each) => each.id === model_name());
  const standard = model?.sampling_defaults[name]?.value;
  const made = el("input", { type: "number", inputmode: "decimal", ...NUMBERS[name], step: "any", placeholder: standard ?? "", on: { input: () => (set(name, made.value), show_error(name, "")) } });
  made.value = options.values[name] ?? "";
  return field(name, made);
}

/** The panel of all other options. */
export function panel() {
  const logprobs = el("input", { type: "checkbox", id: "option-logprobs", checked: options.values.logprobs, on: { change: () => set("logprobs", logprobs.checked) } });
  const tool_choice = select("tool_choice", ["auto", "required", "none"].map((each) => [each, t(`choice_${each}`)]), options.values.tool_choice, (value) => set("tool_choice", value));
  const group = (name, ...fields) => el("fieldset", {}, el("legend", {}, t(name)), el("div", { class: "grid" }, fields));
  return el(
    "div",
    { class: "options", id: "options", role: "group", "aria-label": t("options"), tabindex: "0" },
    group("general", area("system", 2, { spellcheck: "true" }), el("div", { class: "wide" }, el("label", {}, logprobs, t("logprobs")))),
    group("sampling", Object.keys(NUMBERS).map(numeric), area("stop_texts", 2)),
    group("structure", area("tools", 4, { class: "json" }), field("tool_choice", tool_choice), area("schema", 4, { class: "json" })),
  );
}

/** Says at a field what is wrong with it, and goes there. "" says nothing any more. Whether there is such a field. */
export function show_error(parameter, problem) {
  const name = PARAMETERS[parameter] ?? parameter;
  const control = document.getElementById(`option-${name}`);
  const place = document.getElementById(`error-${name}`);
  if (!control || !place) return false;
  place.textContent = problem;
  control.toggleAttribute("aria-invalid", false);
  if (problem) {
    control.setAttribute("aria-invalid", "true");
    control.focus();
  }
  return true;
}

/** A field whose text cannot be sent. */
export class FieldError extends Error {
  constructor(name, problem) {
    super(problem);
    this.field = name;
  }
}

function json(name, is_right, otherwise) {
  const text = (options.values[name] ?? "").trim();
  if (!text) return undefined;
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new FieldError(name, t("json_error", { problem: error.message }));
  }
  if (!is_right(value)) throw new FieldError(name, t(otherwise));
  return value;
}

/** The body of a chat request with these options. Throws FieldError. */
export function request(messages, model = model_name()) {
  const { values } = options;
  const system = (values.system ?? "").trim();
  const body = {
    model,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true,
    stream_options: { include_usage: true },
    include_timing: true,
  };
  if (values.tier) body.service_tier = values.tier;
  for (const name of Object.keys(NUMBERS)) {
    const text = values[name] ?? "";
    if (text !== "") body[name] = Number(text);
  }
  const stop = (values.stop_texts ?? "").split("\n").filter(Boolean);
  if (stop.length) body.stop = stop;
  if (values.logprobs) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  const tools = json("tools", Array.isArray, "must_be_list");
  if (tools?.length) Object.assign(body, { tools: tools.map(as_tool), tool_choice: values.tool_choice || "auto" });
  const schema = json("schema", (value) => value && typeof value === "object" && !Array.isArray(value), "must_be_object");
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
  return body;
}

// A function may stand there without its frame.
const as_tool = (tool) => (tool?.type === "function" && tool.function ? tool : { type: "function", function: tool });
