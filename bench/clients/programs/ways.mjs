// Ways of using a client, for the programs in JavaScript; see ways.py.

import { readFileSync } from "node:fs";
import { join } from "node:path";

export const baseURL = process.env.HEADWAY_BASE_URL;
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
