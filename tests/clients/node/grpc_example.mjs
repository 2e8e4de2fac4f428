// The example for backend services in TypeScript: compiled with its types checked, and run.
import { execFileSync } from "node:child_process";
import { copyFileSync, readFileSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import * as report from "./report.mjs";

const here = dirname(fileURLToPath(import.meta.url));
const run = (...command) => execFileSync("node", command, { cwd: here, encoding: "utf8" });
// grpc-js and its types are found beside the programs alone.
writeFileSync(join(here, "package.json"), JSON.stringify({ type: "module" }));
copyFileSync(join(report.root, "client/examples/typescript/backend.ts"), join(here, "backend.ts"));

await report.works("its types", () => {
  const line = readFileSync(join(here, "backend.ts"), "utf8").split("\n").find((each) => each.includes("npx tsc"));
  const options = line.split("npx tsc ")[1].split(" backend.ts")[0].split(" ");
  try {
    run(join(here, "../node_modules/typescript/bin/tsc"), ...options, "backend.ts");
  } catch (error) {
    throw new Error(error.stdout);
  }
});
let told = "";
await report.works("an answer, a stop and a refusal", () => {
  told = run("backend.js", report.address, report.apiKey, report.model, `${report.root}/proto`);
  for (const part of [report.answer, "tokens, request ", "stopped after:", "refused: INVALID_ARGUMENT: "]) report.check(told.includes(part), told);
});
