"use strict";

const $ = id => document.getElementById(id);

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function button(className, text, act) {
  const made = element("button", className, text);
  made.type = "button";
  made.addEventListener("click", act);
  return made;
}

// Text changes only where it differs, so that a selection and a screen reader stay where they are.
function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Bring the children of a node in line with the items: an item keeps its element, and with it focus and openness.
function list(container, items, keyOf, make, update) {
  const old = new Map();
  for (const child of Array.from(container.children)) {
    if (old.has(child.dataset.key)) child.remove();
    else old.set(child.dataset.key, child);
  }
  let place = container.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    let child = old.get(key);
    old.delete(key);
    if (!child) {
      child = make(item);
      child.dataset.key = key;
    }
    if (child !== place) container.insertBefore(child, place);
    else place = place.nextElementSibling;
    update(child, item);
  }
  for (const child of old.values()) child.remove();
}

// Keys are kept for the session of this tab alone, and are sent in a header, never in an address.
const API_KEY = "headway-key";

function withKey(name, headers = {}) {
  const key = sessionStorage.getItem(name) ?? sessionStorage.getItem(API_KEY);
  return key ? {...headers, authorization: `Bearer ${key}`} : headers;
}

// Ask for a key in a dialog; the promise is true if one was given.
function askForKey(name, text, error) {
  sessionStorage.removeItem(name);
  const dialog = element("dialog"), form = element("form"), input = element("input"), label = element("label", "", text);
  const heading = element("h2", "", "API key"), alert = element("p", "bad", error);
  heading.id = "key-heading";
  dialog.setAttribute("aria-labelledby", heading.id);
  alert.id = "key-error";
  alert.setAttribute("role", "alert");
  Object.assign(input, {id: "key", type: "password", autocomplete: "off", spellcheck: false, required: true});
  label.htmlFor = input.id;
  form.append(heading, label, input, alert, element("button", "primary", "Continue"));
  dialog.append(form);
  document.body.append(dialog);
  dialog.showModal();
  return new Promise(resolve => {
    form.addEventListener("submit", event => {
      event.preventDefault();
      sessionStorage.setItem(name, input.value.trim());
      dialog.close("given");
    });
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "given");
    });
  });
}

async function errorOf(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text || `The server answers ${response.status}.`;
  }
}

// Data of the server-sent events, those that arrive together at once. EventSource cannot send a key: fetch reads them.
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    yield events.filter(event => event.startsWith("data: ")).map(event => event.slice(6));
  }
}

const isLoopback = host => /^(localhost|127\..*|\[::1\])$/.test(host);

// Name of the server's model, and the link to Ray's dashboard, if this browser can reach it.
async function describeServer() {
  const welcome = await (await fetch("/", {headers: {accept: "application/json"}})).json();
  const ray = welcome.ray_dashboard && new URL(welcome.ray_dashboard);
  if (ray && (isLoopback(location.hostname) || !isLoopback(ray.hostname))) {
    $("ray").href = ray.href;
    $("ray").hidden = false;
  }
  return welcome;
}
