// Vercel's AI SDK with `@ai-sdk/openai-compatible`.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";
import {
  apiKey, baseURL, checkGreeting, checkPerson, checkWeather, getWeather, greeting, model as name, person, run, weather,
} from "./ways.mjs";

const provider = createOpenAICompatible({
  name: "headway", baseURL, apiKey, includeUsage: true, supportsStructuredOutputs: true,
});
const common = { model: provider(name), maxRetries: 0 };
const schema = z.object({ name: z.string(), age: z.number().int() });
const onError = ({ error }) => { throw error; };

await run(["ai", "@ai-sdk/openai-compatible", "zod"], {
  async text() {
    checkGreeting((await generateText({ ...common, prompt: greeting.question })).text);
  },
  async stream() {
    let text = "";
    for await (const part of streamText({ ...common, prompt: greeting.question, onError }).textStream) text += part;
    checkGreeting(text);
  },
  async structured() {
    checkPerson((await generateObject({ ...common, prompt: person.question, schema })).object);
    const streamed = streamObject({ ...common, prompt: person.question, schema, onError });
    let last;
    for await (const part of streamed.partialObjectStream) last = part;
    checkPerson(last);
    checkPerson(await streamed.object);
  },
  async tools() {
    const inputSchema = z.object({ city: z.string() });
    const tools = { get_weather: tool({ description: "Weather", inputSchema, execute: getWeather }) };
    const fields = { ...common, prompt: weather.question, tools, stopWhen: stepCountIs(4) };
    checkWeather((await generateText(fields)).text);
    let text = "";
    for await (const part of streamText({ ...fields, onError }).textStream) text += part;
    checkWeather(text);
  },
});
