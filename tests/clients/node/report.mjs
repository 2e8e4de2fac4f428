// What a client's program tells the matrix, and where it finds the stack: as python/report.py.
import { appendFileSync, readFileSync } from "node:fs";

const given = process.env;
export const baseURL = given.CLIENTS_BASE_URL;
export const apiKey = given.CLIENTS_API_KEY;
export const limitedKey = given.CLIENTS_LIMITED_KEY;
export const model = given.CLIENTS_MODEL;
export const address = given.CLIENTS_ADDRESS;
export const root = given.CLIENTS_ROOT;

export const cities = ["Paris", "Oslo", "Rome", "Cairo", "Lima"];
export const person = "Extract: Anna, 34, lives in Oslo.";
export const question = "What is the capital of Japan?";
export const answer = "Tokyo";
export const tooLong = "word ".repeat(6000);
export const result = { weather: "sunny", temperature: 21 };
export const questionOf = (city) => `What is the weather in ${city}?`;
export const read = (path) => readFileSync(path, "utf8");

const tell = (feature, outcome, detail = "") =>
  appendFileSync(`${given.CLIENTS_OUT}/results.jsonl`, JSON.stringify({ feature, outcome, detail }) + "\n");

export function check(truth, detail = "") {
  if (!truth) throw new Error(`not as expected: ${JSON.stringify(detail)}`);
}

// Two vectors must point the same way.
export function checkAlike(values, expected) {
  const cosine = values.reduce((sum, each, index) => sum + each * expected[index], 0);
  check(cosine / (Math.hypot(...values) * Math.hypot(...expected)) >= 1 - 1e-6, cosine);
}

// The block must end without an exception.
export async function works(feature, block) {
  try {
    await block();
    tell(feature, "works");
  } catch (error) {
    tell(feature, "failed", `${error?.stack} ${error?.responseBody ?? ""}`);
  }
}

// The block must end with the client's own exception, for which `isRight` holds and whose text has the name.
export async function refused(feature, isRight, name, block) {
  try {
    await block();
  } catch (error) {
    const text = `${error?.message} ${JSON.stringify(error?.error ?? "")} ${error?.responseBody ?? ""}`;
    if (isRight(error) && text.includes(name)) tell(feature, "refused", error.constructor.name);
    else tell(feature, "failed", `expected ${name}: ${error?.stack} ${text}`);
    return;
  }
  tell(feature, "failed", "it was not refused");
}
