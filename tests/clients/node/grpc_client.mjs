// grpc-js, which reads proto/ when it starts.
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";
import * as report from "./report.mjs";

const { check, refused, works } = report;
const options = { keepCase: true, longs: String, enums: String, defaults: true, oneofs: true };
const includeDirs = [`${report.root}/proto`];
const definition = loader.loadSync("millrace/inference/v1/inference.proto", { ...options, includeDirs });
const { InferenceService } = grpc.loadPackageDefinition(definition).millrace.inference.v1;
const client = new InferenceService(report.address, grpc.credentials.createInsecure());

const metadata = (key = report.apiKey) => {
  const made = new grpc.Metadata();
  made.set("authorization", `Bearer ${key}`);
  return made;
};
const asked = (content = report.question, more = {}) => ({
  model: report.model,
  conversation: { messages: [{ role: "ROLE_USER", content }] },
  sampling: { temperature: 0, max_tokens: 60 },
  ...more,
});
const chat = (request, key) =>
  new Promise((resolve, reject) => {
    const responses = [];
    const call = client.Chat(request, metadata(key));
    call.on("data", (response) => responses.push(response));
    call.on("error", (error) => {
      // What ErrorInfo says is in the binary trailer.
      error.responseBody = String(error.metadata?.get("grpc-status-details-bin")[0] ?? "");
      reject(error);
    });
    call.on("end", () => resolve(responses));
  });
const textOf = (responses) => responses.flatMap(({ choices }) => choices.map(({ content }) => content)).join("");

await works("chat as a stream", async () => {
  const responses = await chat(asked());
  check(textOf(responses).includes(report.answer), responses);
  check(responses.at(-1).usage.completion_tokens > 0);
});
await works("structured output", async () => {
  const schema = { type: "object", properties: { age: { type: "integer" } }, required: ["age"] };
  const response_format = { json_schema: { schema_json: JSON.stringify(schema) } };
  check("age" in JSON.parse(textOf(await chat(asked(report.question, { response_format })))));
});
await works("tokens and models", async () => {
  const call = (method, request) =>
    new Promise((resolve, reject) =>
      client[method](request, metadata(), (error, response) => (error ? reject(error) : resolve(response))),
    );
  const { token_ids } = await call("Tokenize", { model: report.model, text: "hello" });
  const { text } = await call("Detokenize", { model: report.model, token_ids });
  check(text === "hello", text);
  check((await call("ListModels", {})).models.length);
});
await works("a stream that is left", async () => {
  const call = client.Chat(asked(report.question, { sampling: { max_tokens: 3000, ignore_eos: true } }), metadata());
  const code = await new Promise((resolve) => {
    call.on("data", () => call.cancel());
    call.on("error", (error) => resolve(error.code));
  });
  check(code === grpc.status.CANCELLED, code);
});

const has = (name) => (error) => error.code === grpc.status[name];
await refused("context too long", has("INVALID_ARGUMENT"), "CONTEXT_LENGTH_EXCEEDED", () =>
  chat(asked(report.tooLong)),
);
await refused("unknown model", has("NOT_FOUND"), "MODEL_NOT_FOUND", () => chat(asked("hi", { model: "nobody" })));
await refused("wrong key", has("UNAUTHENTICATED"), "INVALID_CREDENTIALS", () => chat(asked(), "mr-wrong"));
await refused("too many requests", has("RESOURCE_EXHAUSTED"), "REQUEST_RATE_EXCEEDED", async () => {
  for (let time = 0; time < 2; time++) await chat(asked(), report.limitedKey);
});
client.close();
