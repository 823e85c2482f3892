"use strict";

const STORED = "headway-chat";
const FIELDS = ["model", "band", "system", "temperature", "max_tokens", "tools"];
const IDEAS = ["What is the capital of France?", "Write a haiku about the sea", "Plan a rainy Sunday"];
const SAMPLE_TOOL = [{type: "function", function: {name: "get_weather", description: "Weather of a city, now",
  parameters: {type: "object", properties: {city: {type: "string"}}, required: ["city"]}}}];
const BANDS = {priority: "interactive", default: "standard", flex: "batch"};
const ROLES = {user: "You", assistant: "Answer", tool: "Result of a tool"};
const NEAR_END_PX = 80;

let {messages, settings} = load();
let running = null;
const keys = new WeakMap();
let numKeys = 0;

function keyOf(message) {
  if (!keys.has(message)) keys.set(message, numKeys++);
  return keys.get(message);
}

// What a former visit has stored; text that is not a conversation counts as none.
function load() {
  try {
    const {messages, settings} = JSON.parse(localStorage.getItem(STORED));
    if (Array.isArray(messages) && messages.every(message => message.role in ROLES)) return {messages, settings: {...settings}};
  } catch { /* nothing is stored, or another program's text */ }
  return {messages: [], settings: {}};
}

function save() {
  try {
    localStorage.setItem(STORED, JSON.stringify({messages, settings}));
  } catch {
    put($("status"), "This browser has no room to keep the conversation.");
  }
}

function makeMessage(message) {
  const made = element("article", `message ${message.role}`);
  made.append(element("h2", "unseen", ROLES[message.role]));
  if (message.role === "assistant") {
    const reasoning = element("details", "reasoning");
    reasoning.open = true;
    reasoning.append(element("summary", "", "Reasoning"), element("p"));
    made.append(reasoning);
  }
  made.append(element("div", "content"));
  if (message.role === "assistant") {
    const foot = element("div", "foot");
    if (navigator.clipboard) foot.append(button("plain", "Copy", () => navigator.clipboard.writeText(message.content)));
    foot.append(button("plain again", "Try again", () => answer(messages.indexOf(message))), element("span", "note"));
    made.append(element("div", "calls"), foot);
  }
  return made;
}

function showMessage(node, message) {
  const content = node.querySelector(".content");
  if (message.role !== "assistant") return put(content, message.content);
  const isLast = message === messages.at(-1), isRunning = isLast && running !== null;
  const [reasoning, calls, foot] = [".reasoning", ".calls", ".foot"].map(name => node.querySelector(name));
  const hasAnswer = Boolean(message.content || message.tool_calls);
  reasoning.hidden = !message.reasoning;
  put(reasoning.lastElementChild, message.reasoning ?? "");
  if (hasAnswer && !node.hasAnswer) reasoning.open = false;
  node.hasAnswer = hasAnswer;
  renderMarkdown(content, message.content);
  content.classList.toggle("waiting", isRunning && !hasAnswer);
  list(calls, message.tool_calls ?? [], call => call.id, makeCall, showCall);
  const form = calls.lastElementChild?.querySelector("form");
  if (form) form.hidden = !isLast || isRunning;
  foot.hidden = isRunning;
  foot.querySelector(".again").hidden = !isLast;
  put(foot.querySelector(".note"), message.note ?? "");
}

function makeCall(call) {
  const made = element("div", "call"), bar = element("div", "code-bar");
  bar.append(element("span", "", `calls ${call.function.name}`));
  made.append(bar, scrolling("pre"));
  return made;
}

function showCall(node, call) {
  let text = call.function.arguments;
  try {
    text = JSON.stringify(JSON.parse(text), null, 2);
  } catch { /* the arguments are still growing */ }
  put(node.querySelector("pre"), text);
}

// The results of an answer's calls are asked for in one form below them.
function askForResults(message, node) {
  const form = element("form");
  const fields = message.tool_calls.map(call => {
    const field = element("textarea"), label = element("label", "", `Result of ${call.function.name}`);
    Object.assign(field, {id: `result-${call.id}`, rows: 2, required: true});
    label.htmlFor = field.id;
    form.append(label, field);
    return field;
  });
  form.append(element("button", "", "Send results"));
  form.addEventListener("submit", event => {
    event.preventDefault();
    message.tool_calls.forEach((call, index) =>
      messages.push({role: "tool", tool_call_id: call.id, content: fields[index].value}));
    answer(messages.length);
  });
  node.querySelector(".call:last-child").append(form);
}

function show() {
  const scroll = $("scroll"), isAtEnd = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < NEAR_END_PX;
  $("intro").hidden = messages.length > 0;
  list($("messages"), messages, keyOf, makeMessage, showMessage);
  const last = messages.at(-1), node = $("messages").lastElementChild;
  if (running === null && last?.tool_calls && !node.querySelector("form")) askForResults(last, node);
  $("new").hidden = messages.length === 0;
  $("send").hidden = running !== null;
  $("stop").hidden = running === null;
  $("messages").setAttribute("aria-busy", String(running !== null));
  if (isAtEnd) scroll.scrollTop = scroll.scrollHeight;
}

function fail(text) {
  $("failure").hidden = !text;
  put($("failure").firstElementChild, text);
  if (text) $("scroll").scrollTop = $("scroll").scrollHeight;
}

function bodyOf(history) {
  const {model, system, temperature, max_tokens, tools} = settings;
  const sent = history.map(({role, content, tool_calls, tool_call_id}) => ({role, content, tool_calls, tool_call_id}));
  return JSON.stringify({
    model: $("s-model").value || model,
    messages: system ? [{role: "system", content: system}, ...sent] : sent,
    temperature: temperature ? Number(temperature) : undefined,
    max_tokens: max_tokens ? Number(max_tokens) : undefined,
    tools: tools ? JSON.parse(tools) : undefined,
    stream: true,
    stream_options: {include_usage: true, continuous_usage_stats: true},
  });
}

// Send a request; a key is asked for as often as the server refuses the last one.
async function post(body, signal) {
  const headers = {"content-type": "application/json", ...(settings.band && {"x-headway-priority": settings.band})};
  for (;;) {
    const response = await fetch("/v1/chat/completions", {method: "POST", body, signal, headers: withKey(API_KEY, headers)});
    if (response.ok) return response;
    const error = await errorOf(response);
    if (response.status !== 401 || !(await askForApiKey(error))) throw new Error(error);
  }
}

function askForApiKey(error) {
  const hadKey = sessionStorage.getItem(API_KEY) !== null;
  return askForKey(API_KEY, "This server has API keys. Enter yours:", hadKey ? error : "").then(isGiven => {
    if (isGiven) listModels();
    return isGiven;
  });
}

class Speed {
  constructor() { this.started = performance.now(); }
  add(numTokens) {
    this.last = performance.now();
    if (this.first === undefined) [this.first, this.numFirst] = [this.last, numTokens];
    this.numTokens = numTokens;
  }
  get text() {
    if (!this.numTokens) return "";
    const seconds = (this.last - this.first) / 1000, numLater = this.numTokens - this.numFirst;
    const speed = seconds > 0 && numLater > 0 ? ` · ${(numLater / seconds).toFixed(1)} tokens/s` : "";
    return `${this.numTokens} tokens${speed}`;
  }
  get wait() { return this.first && `first after ${((this.first - this.started) / 1000).toFixed(2)} s`; }
}

function add(message, delta) {
  message.content += delta.content ?? "";
  if (delta.reasoning_content) message.reasoning = (message.reasoning ?? "") + delta.reasoning_content;
  for (const {index, id, function: {name, arguments: text}} of delta.tool_calls ?? []) {
    message.tool_calls ??= [];
    message.tool_calls[index] ??= {id, type: "function", function: {name, arguments: ""}};
    message.tool_calls[index].function.arguments += text ?? "";
  }
}

async function read(response, message, speed) {
  let frame = null, ending, band;
  const draw = () => {
    frame = null;
    show();
    put($("status"), speed.text);
  };
  try {
    for await (const events of eventsOf(response)) {
      for (const event of events.filter(each => each !== "[DONE]")) {
        const chunk = JSON.parse(event);
        if (chunk.error) throw new Error(chunk.error.message);
        band = BANDS[chunk.service_tier] ?? band;
        if (chunk.usage?.completion_tokens) speed.add(chunk.usage.completion_tokens);
        for (const choice of chunk.choices) {
          add(message, choice.delta);
          ending = choice.finish_reason ?? ending;
        }
      }
      frame ??= requestAnimationFrame(draw);
    }
  } finally {
    cancelAnimationFrame(frame);
  }
  if (!ending) throw new Error("The server has ended the answer too early.");
  return [band, ending === "length" && "cut at the limit of tokens"];
}

// Answer the first `number` messages; what comes after them is dropped.
async function answer(number) {
  if (running) return;
  running = new AbortController();
  messages.length = number;
  const history = [...messages], message = {role: "assistant", content: ""}, speed = new Speed();
  messages.push(message);
  fail("");
  put($("status"), "");
  show();
  $("scroll").scrollTop = $("scroll").scrollHeight;
  let facts = [], error = "";
  try {
    facts = await read(await post(bodyOf(history), running.signal), message, speed);
  } catch (failure) {
    if (running.signal.aborted) facts = ["stopped"];
    else error = failure instanceof TypeError ? "The server cannot be reached." : failure.message;
    delete message.tool_calls;
  }
  running = null;
  if (messages.at(-1) !== message) return show();  // another conversation has begun
  message.note = [speed.text, speed.wait, ...facts].filter(Boolean).join(" · ");
  if (!message.content && !message.reasoning && !message.tool_calls && (error || facts[0] === "stopped")) messages.pop();
  put($("status"), "");
  show();
  save();
  fail(error || (messages.at(-1)?.role === "assistant" || !messages.length ? "" : "There is no answer yet."));
}

function send(text) {
  if (!text.trim() || running) return;
  messages.push({role: "user", content: text});
  save();
  answer(messages.length);
}

function growInput() {
  $("input").style.height = "auto";
  $("input").style.height = `${$("input").scrollHeight + 2}px`;
}

function showSettings(isOpen) {
  $("settings").hidden = !isOpen;
  $("toggle").setAttribute("aria-expanded", String(isOpen));
}

async function listModels() {
  const response = await fetch("/v1/models", {headers: withKey(API_KEY)});
  if (response.status === 401) return askForApiKey(await errorOf(response));
  if (!response.ok) return;
  const names = (await response.json()).data.map(model => model.id);
  $("s-model").replaceChildren(...names.map(name => new Option(name)));
  $("s-model").value = names.includes(settings.model) ? settings.model : names[0];
  $("forget-key").hidden = sessionStorage.getItem(API_KEY) === null;
}

$("composer").addEventListener("submit", event => {
  event.preventDefault();
  if (running) return;
  send($("input").value);
  $("input").value = "";
  growInput();
});
$("input").addEventListener("input", growInput);
$("input").addEventListener("keydown", event => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("composer").requestSubmit();
});
document.addEventListener("keydown", event => {
  if (event.key === "Escape") running?.abort();
});
$("stop").addEventListener("click", () => {
  running?.abort();
  $("input").focus();
});
$("failure").lastElementChild.addEventListener("click", () => {
  if (messages.at(-1).role === "assistant") messages.pop();
  answer(messages.length);
});
$("new").addEventListener("click", () => {
  running?.abort();
  messages = [];
  save();
  fail("");
  show();
  $("input").focus();
});
$("toggle").addEventListener("click", () => showSettings($("settings").hidden));
$("forget-key").addEventListener("click", () => {
  sessionStorage.removeItem(API_KEY);
  listModels();
});
$("sample-tool").addEventListener("click", () => {
  settings.tools = $("s-tools").value = JSON.stringify(SAMPLE_TOOL, null, 1);
  save();
});
for (const name of FIELDS) {
  $(`s-${name}`).value = settings[name] ?? "";
  $(`s-${name}`).addEventListener("input", event => {
    settings[name] = event.target.value;
    save();
  });
}
for (const idea of IDEAS) {
  const item = element("li");
  item.append(button("", idea, () => send(idea)));
  $("ideas").append(item);
}
put($("base-url"), `${location.origin}/v1`);
showSettings(innerWidth > 900);
show();
if (["user", "tool"].includes(messages.at(-1)?.role)) fail("There is no answer yet.");
describeServer().then(({model}) => {
  for (const id of ["model", "intro-model"]) put($(id), model);
  document.title = `${model} – Headway`;
});
listModels();
