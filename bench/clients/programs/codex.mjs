// Codex with its default settings: an answer, and a task: edit a file, run its test, report.

import { spawnSync } from "node:child_process";
import { mkdtempSync, readFileSync, readdirSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { apiKey, baseURL, checkGreeting, checkPerson, codex as asked, coding, model, run } from "./ways.mjs";

const NAME = "@openai/codex-linux-x64";
const vendor = join(process.cwd(), "node_modules", NAME, "vendor");
const binary = join(vendor, readdirSync(vendor)[0], "bin", "codex");

function codex(question, files = {}, further = []) {
  const [home, cwd] = ["home", "work"].map((name) => mkdtempSync(join(tmpdir(), `hw-codex-${name}-`)));
  for (const [name, text] of Object.entries(files)) writeFileSync(join(cwd, name), text);
  const settings = {
    model_provider: "headway", model, "model_providers.headway.name": "headway",
    "model_providers.headway.base_url": baseURL, "model_providers.headway.wire_api": "responses",
    "model_providers.headway.env_key": "OPENAI_API_KEY",
  };
  const options = Object.entries(settings).flatMap(([name, value]) => ["-c", `${name}=${JSON.stringify(value)}`]);
  const isolated = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", ...further, question];
  const env = { PATH: process.env.PATH, HOME: home, OPENAI_API_KEY: apiKey };
  const { stdout, stderr, status } = spawnSync(binary, ["exec", ...options, ...isolated], {
    cwd, env, encoding: "utf8", stdio: ["ignore", "pipe", "pipe"],
  });
  if (status !== 0) throw new Error(`exit code ${status}: ${stdout?.slice(-300)} ${stderr?.slice(-300)}`);
  return { stdout, cwd };
}

await run([NAME], {
  async text() {
    checkGreeting(codex(asked.greeting).stdout);
  },
  async stream() {
    const events = codex(asked.greeting, {}, ["--json"]).stdout.trim().split("\n").map((line) => JSON.parse(line));
    checkGreeting(events.find(({ item }) => item?.type === "agent_message").item.text);
  },
  async structured() {
    const properties = { name: { type: "string" }, age: { type: "integer" } };
    const schema = { type: "object", properties, required: ["name", "age"], additionalProperties: false };
    const files = { "person.json": JSON.stringify(schema) };
    checkPerson(JSON.parse(codex(asked.person, files, ["--output-schema", "person.json"]).stdout));
  },
  async tools() {
    const { stdout, cwd } = codex(asked.task, coding.files);
    if (stdout.trim() !== coding.answer) throw new Error(`the answer is ${stdout}`);
    const text = readFileSync(join(cwd, coding.name), "utf8");
    if (text !== coding.repaired) throw new Error(`the file is ${text}`);
  },
});
