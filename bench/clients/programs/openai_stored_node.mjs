// The `openai` package for Node with stored responses: background, resumed streams, chains, conversations.

import OpenAI from "openai";
import {
  apiKey, baseURL, checkGreeting, checkPerson, checkWeather, getWeather, greeting, model, person, run, weather,
} from "./ways.mjs";

const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", name: "get_weather", parameters, strict: false }];

// Returns a response that was made in the background.
async function made(fields) {
  let reply = await client.responses.create({ model, background: true, ...fields });
  while (reply.status === "queued" || reply.status === "in_progress") {
    await new Promise((resolve) => setTimeout(resolve, 100));
    reply = await client.responses.retrieve(reply.id);
  }
  return reply;
}

function outputsOf({ output }) {
  const calls = output.filter(({ type }) => type === "function_call");
  return calls.map(({ call_id, arguments: text }) => (
    { type: "function_call_output", call_id, output: getWeather(JSON.parse(text)) }
  ));
}

await run(["openai"], {
  async text() {
    const reply = await made({ input: greeting.question });
    checkGreeting(reply.output_text);
    const { output } = await client.responses.compact({ model, input: greeting.question, previous_response_id: reply.id });
    const input = [...output, { role: "user", content: greeting.question }];
    checkGreeting((await client.responses.create({ model, input })).output_text);
    await client.responses.delete(reply.id);
  },
  async stream() {
    const events = [];
    const first = await client.responses.create({ model, input: greeting.question, background: true, stream: true });
    for await (const event of first) {
      events.push(event);
      if (event.type === "response.output_text.delta") break;
    }
    const options = { stream: true, starting_after: events.at(-1).sequence_number };
    for await (const event of await client.responses.retrieve(events[0].response.id, options)) events.push(event);
    if (events.some(({ sequence_number }, index) => sequence_number !== index)) throw new Error("an event is missing");
    checkGreeting(events.map(({ type, delta }) => (type === "response.output_text.delta" ? delta : "")).join(""));
  },
  async structured() {
    const properties = { name: { type: "string" }, age: { type: "integer" } };
    const schema = { type: "object", properties, required: ["name", "age"], additionalProperties: false };
    const text = { format: { type: "json_schema", name: "person", schema, strict: true } };
    checkPerson(JSON.parse((await made({ input: person.question, text })).output_text));
  },
  async tools() {
    const asked = await made({ input: weather.question, tools });
    checkWeather((await made({ input: outputsOf(asked), tools, previous_response_id: asked.id })).output_text);
    const conversation = (await client.conversations.create({})).id;
    const first = await client.responses.create({ model, input: weather.question, tools, conversation });
    checkWeather((await client.responses.create({ model, input: outputsOf(first), tools, conversation })).output_text);
  },
});
