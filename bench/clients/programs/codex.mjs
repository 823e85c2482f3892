// Codex with its default settings: an answer, and a task: edit a file, run its test, report.

import { readdirSync } from "node:fs";
import { apiKey, baseURL, checkCoding, checkGreeting, checkPerson, codex as asked, coding, model, run, runAgent } from "./ways.mjs";

const NAME = "@openai/codex-linux-x64";
const VENDOR = `${NAME}/vendor`;
const BINARY = `${VENDOR}/${readdirSync(`node_modules/${VENDOR}`)[0]}/bin/codex`;
const SETTINGS = {
  model_provider: "headway", model, "model_providers.headway.name": "headway",
  "model_providers.headway.base_url": baseURL, "model_providers.headway.wire_api": "responses",
  "model_providers.headway.env_key": "OPENAI_API_KEY",
};

function codex(question, files = {}, further = []) {
  const settings = Object.entries(SETTINGS).flatMap(([name, value]) => ["-c", `${name}=${JSON.stringify(value)}`]);
  const isolated = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", ...further, question];
  return runAgent(BINARY, ["exec", ...settings, ...isolated], { OPENAI_API_KEY: apiKey }, files);
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
    checkCoding(codex(asked.task, coding.files));
  },
});
