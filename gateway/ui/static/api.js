// The gateway's API as the page calls it: with the tab's key, errors as the API words them, streams read
// event by event.

const ROOT = new URL("../../", import.meta.url);
const KEY = "millrace.key";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

/** What the API has refused: its message, its reason, and the request's id. */
export class ApiError extends Error {
  constructor(message, { status = 0, reason = "", param = "", request = "" } = {}) {
    super(message);
    Object.assign(this, { status, reason, param, request });
  }
}

/** A stream that ended before its end: the connection, or a gateway, is gone. */
export class Cut extends Error {}

async function ask(path, { method = "GET", body, signal } = {}) {
  const headers = { authorization: `Bearer ${key.get()}` };
  if (body !== undefined) headers["content-type"] = "application/json";
  const answer = await fetch(new URL(path, ROOT), {
    method,
    headers,
    signal,
    body: body === undefined ? undefined : JSON.stringify(body),
    credentials: "omit",
    cache: "no-store",
  });
  if (!answer.ok) throw await refusal(answer);
  return answer;
}

async function refusal(answer) {
  const text = await answer.text();
  const request = answer.headers.get("x-request-id") ?? "";
  try {
    const { error } = JSON.parse(text);
    return new ApiError(error.message, { status: answer.status, reason: error.reason ?? error.code, param: error.param, request });
  } catch {
    return new ApiError(text.slice(0, 500) || `HTTP ${answer.status}`, { status: answer.status, request });
  }
}

export async function call(path, options) {
  return (await ask(path, options)).json();
}

/** The events of a streamed answer, parsed. Throws ApiError for an error event, Cut where there is no end. */
export async function* stream(path, body, signal) {
  const answer = await ask(path, { method: "POST", body, signal });
  const request = answer.headers.get("x-request-id") ?? "";
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  try {
    for (;;) {
      let piece;
      try {
        piece = await reader.read();
      } catch (error) {
        if (signal?.aborted) throw error;
        throw new Cut(error.message);
      }
      if (piece.done) throw new Cut("");
      waiting += piece.value;
      let end;
      while ((end = waiting.indexOf("\n\n")) >= 0) {
        const data = data_of(waiting.slice(0, end));
        waiting = waiting.slice(end + 2);
        if (data === "[DONE]") return;
        if (data === "") continue;
        const event = JSON.parse(data);
        if (event.error) throw new ApiError(event.error.message, { reason: event.error.reason, param: event.error.param, request });
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// The data of an event; "" of a comment, which says that the answer is waited for.
const data_of = (event) =>
  event
    .split("\n")
    .filter((line) => line.startsWith("data:"))
    .map((line) => line.slice(5).trimStart())
    .join("\n");
