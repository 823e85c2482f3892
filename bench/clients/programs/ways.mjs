// Ways of using a client, for the programs in JavaScript; see ways.py.

import { spawnSync } from "node:child_process";
import { mkdtempSync, readFileSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

export const baseURL = process.env.HEADWAY_BASE_URL;
export const rootURL = baseURL.replace(/\/v1$/, "");
const scenario = JSON.parse(process.env.HEADWAY_SCENARIO);
export const { model, greeting, weather, person, coding, codex } = scenario;
export const apiKey = "none";

const cities = [];

export function getWeather({ city }) {
  cities.push(city);
  return weather.result;
}

function check(condition, message) {
  if (!condition) throw new Error(message);
}

export function checkGreeting(text) {
  check(String(text).trim() === greeting.answer, `the answer is ${JSON.stringify(text)}`);
}

export function checkWeather(text) {
  const called = cities.splice(0);
  check(called.join() === "Paris", `the tool was called with ${JSON.stringify(called)}`);
  check(String(text).trim() === weather.answer, `the answer is ${JSON.stringify(text)}`);
}

export function checkPerson(found) {
  check(found?.name === person.name && person.ages.includes(found?.age), `the object is ${JSON.stringify(found)}`);
}

// Runs a coding agent's binary with an empty home, in a directory that holds `files`.
export function runAgent(binary, options, variables, files) {
  const [home, cwd] = ["home", "work"].map((name) => mkdtempSync(join(tmpdir(), `hw-agent-${name}-`)));
  for (const [name, text] of Object.entries(files)) writeFileSync(join(cwd, name), text);
  const { stdout, stderr, status } = spawnSync(join(process.cwd(), "node_modules", binary), options, {
    cwd, env: { PATH: process.env.PATH, HOME: home, ...variables }, encoding: "utf8", stdio: ["ignore", "pipe", "pipe"],
  });
  check(status === 0, `exit code ${status}: ${stdout?.slice(-300)} ${stderr?.slice(-300)}`);
  return { stdout, cwd };
}

export function checkCoding({ stdout, cwd }) {
  check(stdout.trim() === coding.answer, `the answer is ${stdout}`);
  const text = readFileSync(join(cwd, coding.name), "utf8");
  check(text === coding.repaired, `the file is ${text}`);
}

export async function run(packages, ways) {
  const modules = join(process.cwd(), "node_modules");
  const versions = packages.map((name) => [name, JSON.parse(readFileSync(join(modules, name, "package.json"))).version]);
  print({ versions: Object.fromEntries(versions) });
  for (const [name, way] of Object.entries(ways)) print({ way: name, ...(await outcome(way)) });
}

function print(fields) {
  console.log(`\nOUTCOME ${JSON.stringify(fields)}`);
}

async function outcome(way) {
  cities.length = 0;
  try {
    await way();
  } catch (error) {
    if (process.env.HEADWAY_TRACEBACKS) console.error(error);
    const reason = `${error?.name}: ${error?.message} ${error?.code ?? ""} ${error?.responseBody ?? ""}`.trim();
    return { outcome: reason.includes("unsupported_parameter") ? "refused" : "failed", reason: reason.slice(0, 600) };
  }
  return { outcome: "passed" };
}
