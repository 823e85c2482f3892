// The `openai` package for Node: chat, stream, the parse helper with zod, `runTools`.

import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import {
  apiKey, baseURL, checkGreeting, checkPerson, checkWeather, getWeather, greeting, model, person, run, weather,
} from "./ways.mjs";

const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const user = (content) => [{ role: "user", content }];
const Person = z.object({ name: z.string(), age: z.number().int() });

await run(["openai", "zod"], {
  async text() {
    const reply = await client.chat.completions.create({ model, messages: user(greeting.question), temperature: 0 });
    checkGreeting(reply.choices[0].message.content);
  },
  async stream() {
    const chunks = await client.chat.completions.create({
      model, messages: user(greeting.question), stream: true, stream_options: { include_usage: true },
    });
    let text = "";
    for await (const chunk of chunks) text += chunk.choices[0]?.delta.content ?? "";
    checkGreeting(text);
    const helper = client.chat.completions.stream({ model, messages: user(greeting.question) });
    checkGreeting(await helper.finalContent());
  },
  async structured() {
    const fields = { model, messages: user(person.question), response_format: zodResponseFormat(Person, "person") };
    checkPerson((await client.chat.completions.parse(fields)).choices[0].message.parsed);
    const helper = client.chat.completions.stream(fields);
    checkPerson((await helper.finalChatCompletion()).choices[0].message.parsed);
  },
  async tools() {
    const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
    const tool = {
      type: "function",
      function: { name: "get_weather", description: "Weather", parameters, function: getWeather, parse: JSON.parse },
    };
    for (const stream of [false, true]) {
      const runner = client.chat.completions.runTools({ model, messages: user(weather.question), tools: [tool], stream });
      checkWeather(await runner.finalContent());
    }
  },
});
