// The `@anthropic-ai/sdk` package for Node: messages, streams, tools, counts and models.

import Anthropic from "@anthropic-ai/sdk";
import {
  apiKey, checkGreeting, checkPerson, checkWeather, getWeather, greeting, model, person, rootURL, run, weather,
} from "./ways.mjs";

const client = new Anthropic({ baseURL: rootURL, apiKey, maxRetries: 0 });
const fields = (content) => ({ model, max_tokens: 8000, messages: [{ role: "user", content }] });
const object = (properties) => ({
  type: "object", properties, required: Object.keys(properties), additionalProperties: false,
});

await run(["@anthropic-ai/sdk"], {
  async text() {
    checkGreeting((await client.messages.create(fields(greeting.question))).content[0].text);
    const models = [];
    for await (const listed of client.models.list()) models.push(listed.id);
    if (models.join() !== model) throw new Error(`the models are ${models}`);
  },
  async stream() {
    let text = "";
    for await (const event of await client.messages.create({ ...fields(greeting.question), stream: true })) {
      if (event.type === "content_block_delta") text += event.delta.text;
    }
    checkGreeting(text);
    checkGreeting(await client.messages.stream(fields(greeting.question)).finalText());
  },
  async structured() {
    const schema = object({ name: { type: "string" }, age: { type: "integer" } });
    const format = { output_config: { format: { type: "json_schema", schema } } };
    checkPerson(JSON.parse((await client.messages.create({ ...fields(person.question), ...format })).content[0].text));
  },
  async tools() {
    const tools = [{ name: "get_weather", input_schema: object({ city: { type: "string" } }) }];
    for (const isStreamed of [false, true]) {
      const asked = { ...fields(weather.question), tools };
      const answer = async () =>
        isStreamed ? client.messages.stream(asked).finalMessage() : client.messages.create(asked);
      const { content } = await answer();
      const result = { type: "tool_result", tool_use_id: content[0].id, content: getWeather(content[0].input) };
      asked.messages.push({ role: "assistant", content }, { role: "user", content: [result] });
      checkWeather((await answer()).content[0].text);
      const { input_tokens: count } = await client.messages.countTokens({ model, tools, messages: asked.messages });
      if (!(count > 0)) throw new Error(`the count is ${count}`);
    }
    const tool = { name: "get_weather", input_schema: object({ city: { type: "string" } }), run: getWeather, parse: (x) => x };
    const runner = client.beta.messages.toolRunner({ ...fields(weather.question), tools: [tool] });
    checkWeather((await runner.runUntilDone()).content[0].text);
  },
});
