// One answer as it comes: reads the stream of a chat completion into a message.

import { ApiError, Cut, stream } from "./api.js";

/** Asks, and writes what comes into `message`; `changed` is called after each event. Never throws: what went
 * wrong is in the message as `error`, `cut` or `stopped`.
 */
export async function generate(body, message, { signal, changed }) {
  const asked_at = performance.now();
  message.asked = body.model;
  delete message.error;
  delete message.cut;
  delete message.stopped;
  try {
    for await (const event of stream("v1/chat/completions", body, signal)) {
      message.model = event.model;
      message.request = event.id;
      if (event.usage) message.usage = event.usage;
      const choice = event.choices[0];
      if (choice) add(message, choice, asked_at);
      changed();
    }
  } catch (error) {
    if (signal.aborted) message.stopped = true;
    else if (error instanceof Cut) message.cut = true;
    else if (error instanceof ApiError) message.error = { message: error.message, reason: error.reason, param: error.param, request: error.request, status: error.status };
    // The server does not answer at all.
    else if (error instanceof TypeError) message.cut = true;
    else throw error;
  }
  changed();
}

function add(message, choice, asked_at) {
  const { delta } = choice;
  const says = delta.content || delta.reasoning_content || delta.tool_calls;
  if (says && message.seen_ms === undefined) message.seen_ms = performance.now() - asked_at;
  message.content += delta.content ?? "";
  if (delta.reasoning_content) message.reasoning = (message.reasoning ?? "") + delta.reasoning_content;
  for (const piece of delta.tool_calls ?? []) {
    const calls = (message.tool_calls ??= []);
    const call = (calls[piece.index] ??= { id: piece.id, type: "function", function: { name: "", arguments: "" } });
    call.function.name += piece.function.name ?? "";
    call.function.arguments += piece.function.arguments ?? "";
  }
  if (choice.logprobs?.content?.length) (message.$logprobs ??= []).push(...choice.logprobs.content);
  if (choice.finish_reason) message.finish = choice.finish_reason;
}

/** The messages that a question is asked with: what was said, and calls with their results. */
export function as_asked(messages) {
  return messages
    .filter((message) => message.role !== "assistant" || message.content || message.tool_calls)
    .map(({ role, content, tool_calls, tool_call_id }) => {
      if (role === "tool") return { role, content, tool_call_id };
      return tool_calls ? { role, content, tool_calls } : { role, content };
    });
}
