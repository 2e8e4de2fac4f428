// A backend service's calls: an answer as it comes, one that is stopped, and a refusal.
//
// npm install @grpc/grpc-js @grpc/proto-loader typescript @types/node; npm pkg set type=module; then, with the folder `proto`:
//   npx tsc --strict --module nodenext --target es2022 backend.ts && node backend.js HOST:PORT KEY MODEL proto
import * as grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";

// What is read of the messages here; `npx proto-loader-gen-types` writes types for all of them.
interface Answer {
  request_id: string;
  choices: { content: string }[];
  usage: { completion_tokens: number } | null;
}
type Chat = (request: object, metadata: grpc.Metadata, options: grpc.CallOptions) => grpc.ClientReadableStream<Answer>;
type Service = grpc.Client & { Chat: Chat };

// keepCase: fields have the names that they have in the protos.
const READ = { keepCase: true, longs: String, enums: String, defaults: true, oneofs: true };

function connect(address: string, protos: string): Service {
  const definition = loadSync("millrace/inference/v1/inference.proto", { ...READ, includeDirs: [protos] });
  const loaded = grpc.loadPackageDefinition(definition) as any;
  // Over TLS: grpc.credentials.createSsl().
  return new loaded.millrace.inference.v1.InferenceService(address, grpc.credentials.createInsecure());
}

// Error details are messages of google.rpc in a binary trailer; the reason stands in them as text.
function reasonOf(error: grpc.ServiceError): string {
  const details = String(error.metadata.get("grpc-status-details-bin")[0] ?? "");
  return /[A-Z]+(_[A-Z]+)+/.exec(details)?.[0] ?? grpc.status[error.code];
}

async function main(address: string, key: string, model: string, protos: string): Promise<void> {
  const service = connect(address, protos);
  const metadata = new grpc.Metadata();
  metadata.set("authorization", `Bearer ${key}`);
  const ask = (content: string, sampling: object): grpc.ClientReadableStream<Answer> => {
    const conversation = { messages: [{ role: "ROLE_USER", content }] };
    // The deadline travels with the call, and ends the answer in the engine as well.
    return service.Chat({ model, conversation, sampling }, metadata, { deadline: Date.now() + 60_000 });
  };

  let last: Answer | undefined;
  for await (const part of ask("What is the capital of Japan?", { temperature: 0, max_tokens: 60 })) {
    process.stdout.write((part as Answer).choices.map(({ content }) => content).join(""));
    last = part as Answer;
  }
  console.log(`\n${last?.usage?.completion_tokens} tokens, request ${last?.request_id}`);

  const story = ask("Tell me a long story.", { max_tokens: 500, ignore_eos: true });
  try {
    for await (const part of story) {
      console.log("stopped after:", (part as Answer).choices[0]?.content);
      // The engine ends the request.
      story.cancel();
    }
  } catch (error) {
    if ((error as grpc.ServiceError).code !== grpc.status.CANCELLED) throw error;
  }

  try {
    for await (const _ of ask("Hello!", { temperature: -1 }));
  } catch (error) {
    const refused = error as grpc.ServiceError;
    console.log(`refused: ${reasonOf(refused)}: ${refused.details}`);
  }
  service.close();
}

const [address, key, model, protos] = process.argv.slice(2);
if (!address || !key || !model || !protos) throw new Error("usage: node backend.js HOST:PORT KEY MODEL PROTO_FOLDER");
await main(address, key, model, protos);
