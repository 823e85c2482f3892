"use strict";

const SHOWN_AS = "http://127.0.0.1:8000", MAX_SHOWN_CHARS = 50000;

// A link leads to a part that may be folded.
function unfold() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  for (let part = target.closest("details"); part; part = part.parentElement.closest("details")) part.open = true;
  target.scrollIntoView();
}

function requestOf(form) {
  const {method} = form.dataset, body = form.querySelector(".body"), file = form.querySelector(".file");
  const path = form.dataset.path.replace(/{(\w+)}/g, (_, name) => encodeURIComponent(form.elements[name].value));
  if (file) {
    const fields = new FormData();
    fields.append("purpose", "batch");
    fields.append("file", file.files[0]);
    return [path, {method, body: fields}];
  }
  return [path, body ? {method, body: body.value, headers: {"content-type": "application/json"}} : {method}];
}

async function send(form, signal) {
  const [path, options] = requestOf(form), status = form.querySelector(".status"), answer = form.querySelector(".answer");
  const started = performance.now();
  put(status, "waiting …");
  let response = await fetch(path, {...options, signal, headers: withKey(API_KEY, options.headers)});
  if (response.status === 401) {
    const hadKey = sessionStorage.getItem(API_KEY) !== null, error = await errorOf(response);
    if (await askForKey(API_KEY, "This server has API keys. Enter yours:", hadKey ? error : "")) return send(form, signal);
    return put(status, error);
  }
  answer.hidden = false;
  let text = "";
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let part; !(part = await reader.read()).done && text.length < MAX_SHOWN_CHARS;) {
    text += part.value;
    put(answer, text);
  }
  reader.cancel();
  put(status, `${response.status} after ${(performance.now() - started).toFixed(0)} ms${text.length < MAX_SHOWN_CHARS ? "" : ", cut here"}`);
  try {
    put(answer, JSON.stringify(JSON.parse(text), null, 2));
  } catch { /* a stream or a text is shown as it came */ }
}

for (const form of document.querySelectorAll(".try")) {
  const submit = form.querySelector("button"), text = submit.textContent;
  let running = null;
  form.hidden = false;
  form.addEventListener("submit", async event => {
    event.preventDefault();
    if (running) return running.abort();
    running = new AbortController();
    put(submit, "Stop");
    try {
      await send(form, running.signal);
    } catch (error) {
      put(form.querySelector(".status"), running.signal.aborted ? "stopped" : `no answer: ${error.message}`);
    }
    running = null;
    put(submit, text);
  });
}
for (const sample of document.querySelectorAll(".sample")) {
  const code = sample.querySelector("code");
  put(code, code.textContent.replaceAll(SHOWN_AS, location.origin));
  if (navigator.clipboard) sample.querySelector(".bar").append(button("plain", "Copy", () => navigator.clipboard.writeText(code.textContent)));
}
addEventListener("hashchange", unfold);
unfold();
describeServer().then(({model}) => put($("model"), model));
