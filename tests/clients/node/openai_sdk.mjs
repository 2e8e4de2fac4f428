// OpenAI's own SDK for Node.
import OpenAI from "openai";
import { ResponsesWS } from "openai/resources/responses/ws";
import * as report from "./report.mjs";

const { check, model, refused, works } = report;
const made = (apiKey) => new OpenAI({ baseURL: report.baseURL, apiKey, maxRetries: 0 });
const client = made(report.apiKey);
const chat = client.chat.completions;
const asked = { model, messages: [{ role: "user", content: report.question }], temperature: 0 };
const weather = {
  type: "function",
  function: {
    name: "get_weather",
    description: "Get the current weather in a city",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
};
const schema = {
  type: "object",
  properties: { name: { type: "string" }, age: { type: "integer" } },
  required: ["name", "age"],
  additionalProperties: false,
};

await works("answer", async () => {
  const whole = await chat.create(asked);
  check(whole.choices[0].message.content.includes(report.answer), whole);
});
await works("stream", async () => {
  let text = "";
  for await (const chunk of await chat.create({ ...asked, stream: true }))
    text += chunk.choices[0]?.delta.content ?? "";
  check(text.includes(report.answer), text);
});
await works("usage of a stream", async () => {
  let usage;
  const options = { stream: true, stream_options: { include_usage: true } };
  for await (const chunk of await chat.create({ ...asked, ...options })) usage = chunk.usage ?? usage;
  check(usage.total_tokens > usage.completion_tokens, usage);
});
await works("five turns with tools", async () => {
  const messages = [];
  for (const city of report.cities) {
    const options = { model, messages, tools: [weather], temperature: 0 };
    messages.push({ role: "user", content: report.questionOf(city) });
    const { message } = (await chat.create({ ...options, tool_choice: "required" })).choices[0];
    messages.push(message);
    const content = JSON.stringify(report.result);
    messages.push({ role: "tool", tool_call_id: message.tool_calls[0].id, content });
    messages.push((await chat.create({ ...options, tool_choice: "none" })).choices[0].message);
  }
  check(messages.length === 4 * report.cities.length && messages.at(-1).content, messages);
});
await works("tools in a stream", async () => {
  const messages = [{ role: "user", content: report.questionOf("Paris") }];
  const runner = chat.stream({ model, messages, tools: [weather], temperature: 0 });
  const whole = await runner.finalChatCompletion();
  check(whole.choices[0].message.tool_calls[0].function.name === "get_weather", whole);
});
await works("structured output", async () => {
  const format = { type: "json_schema", json_schema: { name: "person", strict: true, schema } };
  const messages = [{ role: "user", content: report.person }];
  const whole = await chat.parse({ model, messages, temperature: 0, response_format: format });
  check(JSON.parse(whole.choices[0].message.content).age === 34, whole);
});
await works("completions", async () => {
  const whole = await client.completions.create({ model, prompt: "Once upon a time", max_tokens: 5 });
  check(whole.choices[0].text, whole);
});
await works("models", async () => check((await client.models.retrieve(model)).id === model));
await works("a stream that is left", async () => {
  const stream = await chat.create({ ...asked, stream: true, max_tokens: 1000, ignore_eos: true });
  for await (const _ of stream) break;
  check(stream.controller.signal.aborted);
});

const long = { ...asked, messages: [{ role: "user", content: report.tooLong }] };
const is = (kind) => (error) => error instanceof kind;
await refused("context too long", is(OpenAI.BadRequestError), "context_length_exceeded", () => chat.create(long));
await refused("unknown model", is(OpenAI.NotFoundError), "model_not_found", () =>
  chat.create({ ...asked, model: "nobody" }),
);
await refused("wrong key", is(OpenAI.AuthenticationError), "invalid_api_key", () =>
  made("mr-wrong").chat.completions.create(asked),
);
await refused("too many requests", is(OpenAI.RateLimitError), "rate_limit_exceeded", async () => {
  for (let time = 0; time < 2; time++) await made(report.limitedKey).chat.completions.create(asked);
});
await works("responses", async () => {
  const response = await client.responses.create({ model, input: "hi", max_output_tokens: 20 });
  check(response.output_text, response);
  const { description, ...called } = weather.function;
  const tools = [{ type: "function", description, strict: false, ...called }];
  const asked = { model, tools, temperature: 0, store: false };
  const input = [{ role: "user", content: report.questionOf("Paris") }];
  const stream = client.responses.stream({ ...asked, input, tool_choice: "required" });
  const calling = await stream.finalResponse();
  const call = calling.output.find((item) => item.type === "function_call");
  check(JSON.parse(call.arguments).city === "Paris", calling);
  const result = { type: "function_call_output", call_id: call.call_id, output: JSON.stringify(report.result) };
  const said = await client.responses.create({ ...asked, input: [...input, call, result], tool_choice: "none" });
  check(said.output_text, said);
  const text = { format: { type: "json_schema", name: "person", strict: true, schema } };
  const parsed = await client.responses.parse({ model, input: report.person, temperature: 0, text });
  check(JSON.parse(parsed.output_text).age === 34, parsed);
});
await works("responses over a WebSocket", async () => {
  const socket = new ResponsesWS(client);
  let last = null;
  const ask = (input) =>
    socket.send({
      type: "response.create", model, input, store: false, max_output_tokens: 20, previous_response_id: last,
    });
  let rounds = 0;
  ask("hi");
  for await (const { type, message, error } of socket.stream()) {
    if (type === "error") throw error;
    if (!["response.completed", "response.incomplete"].includes(message?.type)) continue;
    check(message.response.previous_response_id === last && message.response.output.length, message);
    last = message.response.id;
    if (++rounds === 2) break;
    ask("And now?");
  }
  socket.close();
});
await works("embeddings", async () => {
  const { url, api_key, texts, embeddings } = JSON.parse(report.read(process.env.CLIENTS_POOLED));
  const embedder = new OpenAI({ baseURL: `${url}/v1`, apiKey: api_key, maxRetries: 0 });
  for (const form of [undefined, "float"]) {
    const made = await embedder.embeddings.create({ model: "embed", input: texts, encoding_format: form });
    for (const each of made.data) report.checkAlike(each.embedding, embeddings[each.index]);
  }
});
await refused("embeddings of a model that generates", is(OpenAI.BadRequestError), "cannot embed", () =>
  client.embeddings.create({ model, input: "hi" }),
);
