// Claude Code with its default settings: an answer, and a task: edit a file, run its test, report.

import { spawnSync } from "node:child_process";
import { mkdtempSync, readFileSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { apiKey, baseURL, checkGreeting, coding, greeting, model, run } from "./ways.mjs";

const NAME = "@anthropic-ai/claude-code-linux-x64";

function claude(question, format, files = {}) {
  const [home, cwd] = ["home", "work"].map((name) => mkdtempSync(join(tmpdir(), `hw-claude-${name}-`)));
  for (const [name, text] of Object.entries(files)) writeFileSync(join(cwd, name), text);
  const env = {
    PATH: process.env.PATH, HOME: home, ANTHROPIC_BASE_URL: baseURL.replace(/\/v1$/, ""), ANTHROPIC_AUTH_TOKEN: apiKey,
    ANTHROPIC_MODEL: model, ANTHROPIC_SMALL_FAST_MODEL: model, CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
    DISABLE_TELEMETRY: "1", IS_SANDBOX: "1",
  };
  const options = ["-p", question, "--dangerously-skip-permissions", "--output-format", format, "--verbose"];
  const { stdout, stderr, status } = spawnSync(join(process.cwd(), "node_modules", NAME, "claude"), options, { cwd, env, encoding: "utf8" });
  if (status !== 0) throw new Error(`exit code ${status}: ${stdout?.slice(-300)} ${stderr?.slice(-300)}`);
  return { stdout, cwd };
}

await run([NAME], {
  async text() {
    checkGreeting(claude(greeting.question, "text").stdout);
  },
  async stream() {
    const lines = claude(greeting.question, "stream-json").stdout.trim().split("\n").map((line) => JSON.parse(line));
    checkGreeting(lines.at(-1).result);
  },
  async tools() {
    const { stdout, cwd } = claude(coding.question, "text", coding.files);
    if (stdout.trim() !== coding.answer) throw new Error(`the answer is ${stdout}`);
    const text = readFileSync(join(cwd, coding.name), "utf8");
    if (text !== coding.repaired) throw new Error(`the file is ${text}`);
  },
});
