// Vercel's ai with its provider for servers that speak OpenAI's API, and with OpenAI's own over Responses.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, embed, generateObject, generateText, isStepCount, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import * as report from "./report.mjs";

const { check, refused, works } = report;
const provider = (apiKey, options = {}) =>
  createOpenAICompatible({ name: "millrace", baseURL: report.baseURL, apiKey, includeUsage: true, ...options });
const model = provider(report.apiKey)(report.model);
const common = { model, temperature: 0, maxRetries: 0, maxOutputTokens: 100 };
const stopAfter = isStepCount ?? stepCountIs;
const person = z.object({ name: z.string(), age: z.number().int(), city: z.string() });

const called = [];
const tools = {
  get_weather: tool({
    description: "Get the current weather in a city",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => {
      called.push(city);
      return report.result;
    },
  }),
};

await works("answer", async () => {
  const { text, usage } = await generateText({ ...common, prompt: report.question });
  check(text.includes(report.answer) && usage.outputTokens > 0, text);
});
await works("stream", async () => {
  const { textStream } = streamText({ ...common, prompt: report.question });
  let text = "";
  for await (const part of textStream) text += part;
  check(text.includes(report.answer), text);
});
await works("usage of a stream", async () => {
  const stream = streamText({ ...common, prompt: report.question });
  await stream.consumeStream();
  const usage = await stream.usage;
  check(usage.totalTokens > usage.outputTokens && usage.outputTokens > 0, usage);
});
await works("five turns with tools", async () => {
  const messages = [];
  for (const city of report.cities) {
    messages.push({ role: "user", content: report.questionOf(city) });
    const { response, text } = await generateText({ ...common, tools, messages, stopWhen: stopAfter(3) });
    messages.push(...response.messages);
    check(typeof text === "string");
  }
  check(called[0] === report.cities[0], called);
});
await works("tools in a stream", async () => {
  const prompt = report.questionOf("Paris");
  const stream = streamText({ ...common, tools, prompt, toolChoice: "required" });
  await stream.consumeStream();
  check((await stream.toolCalls)[0].input.city === "Paris");
});
await works("structured output by json_schema", async () => {
  const capable = provider(report.apiKey, { supportsStructuredOutputs: true })(report.model);
  const { object } = await generateObject({ ...common, model: capable, schema: person, prompt: report.person });
  check(object.age === 34, object);
});
await works("structured output by json_mode", async () => {
  const { object } = await generateObject({ ...common, output: "no-schema", prompt: report.person });
  check(typeof object === "object", object);
});

await works("responses", async () => {
  const options = { ...common, model: createOpenAI({ baseURL: report.baseURL, apiKey: report.apiKey })(report.model) };
  const { text } = await generateText({ ...options, prompt: report.question });
  check(text.includes(report.answer), text);
  const stream = streamText({ ...options, prompt: report.question });
  let said = "";
  for await (const part of stream.textStream) said += part;
  check(said.includes(report.answer) && (await stream.usage).outputTokens > 0, said);
  called.length = 0;
  const messages = [];
  for (const city of report.cities) {
    messages.push({ role: "user", content: report.questionOf(city) });
    // What is not kept is sent again.
    const providerOptions = { openai: { store: false } };
    const done = await generateText({ ...options, tools, messages, providerOptions, stopWhen: stopAfter(3) });
    messages.push(...done.response.messages);
  }
  check(called[0] === report.cities[0], called);
  const { object } = await generateObject({ ...options, schema: person, prompt: report.person });
  check(object.age === 34, object);
});

const is = (status) => (error) => APICallError.isInstance(error) && error.statusCode === status;
const ask = (more) => generateText({ ...common, prompt: report.question, ...more });
await refused("context too long", is(400), "context_length_exceeded", () => ask({ prompt: report.tooLong }));
await refused("unknown model", is(404), "model_not_found", () =>
  ask({ model: provider(report.apiKey)("nobody") }),
);
await refused("wrong key", is(401), "invalid_api_key", () => ask({ model: provider("mr-wrong")(report.model) }));
await refused("too many requests", is(429), "rate_limit_exceeded", async () => {
  for (let time = 0; time < 2; time++) await ask({ model: provider(report.limitedKey)(report.model) });
});
await refused("embeddings of a model that generates", is(400), "cannot embed", () =>
  embed({ model: provider(report.apiKey).embeddingModel(report.model), value: "hi", maxRetries: 0 }),
);
