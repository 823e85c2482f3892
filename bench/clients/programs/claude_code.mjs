// Claude Code with its default settings: an answer, and a task: edit a file, run its test, report.

import { apiKey, checkCoding, checkGreeting, coding, greeting, model, rootURL, run, runAgent } from "./ways.mjs";

const NAME = "@anthropic-ai/claude-code-linux-x64";
const VARIABLES = {
  ANTHROPIC_BASE_URL: rootURL, ANTHROPIC_AUTH_TOKEN: apiKey, ANTHROPIC_MODEL: model, ANTHROPIC_SMALL_FAST_MODEL: model,
  CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1", DISABLE_TELEMETRY: "1", IS_SANDBOX: "1",
};

function claude(question, format, files = {}) {
  const options = ["-p", question, "--dangerously-skip-permissions", "--output-format", format, "--verbose"];
  return runAgent(`${NAME}/claude`, options, VARIABLES, files);
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
    checkCoding(claude(coding.question, "text", coding.files));
  },
});
