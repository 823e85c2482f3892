// The `openai` package for Node with its Responses API: create, stream, the parse helper with zod, tools.

import OpenAI from "openai";
import { zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import {
  apiKey, baseURL, checkGreeting, checkPerson, checkWeather, getWeather, greeting, model, person, run, weather,
} from "./ways.mjs";

const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const Person = z.object({ name: z.string(), age: z.number().int() });

await run(["openai", "zod"], {
  async text() {
    checkGreeting((await client.responses.create({ model, input: greeting.question })).output_text);
  },
  async stream() {
    let text = "";
    for await (const event of await client.responses.create({ model, input: greeting.question, stream: true })) {
      if (event.type === "response.output_text.delta") text += event.delta;
    }
    checkGreeting(text);
    checkGreeting((await client.responses.stream({ model, input: greeting.question }).finalResponse()).output_text);
  },
  async structured() {
    const fields = { model, input: person.question, text: { format: zodTextFormat(Person, "person") } };
    checkPerson((await client.responses.parse(fields)).output_parsed);
    checkPerson((await client.responses.stream(fields).finalResponse()).output_parsed);
  },
  async tools() {
    const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
    const tools = [{ type: "function", name: "get_weather", parameters, strict: false }];
    const input = [{ role: "user", content: weather.question }];
    const { output } = await client.responses.create({ model, input, tools });
    const call = output.find(({ type }) => type === "function_call");
    const result = { type: "function_call_output", call_id: call.call_id, output: getWeather(JSON.parse(call.arguments)) };
    checkWeather((await client.responses.create({ model, input: [...input, ...output, result], tools })).output_text);
  },
});
