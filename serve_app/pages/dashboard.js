"use strict";

// Parts of a request's time as the legend shows them: the queues are one.
const GROUPS = {
  received: ["received"],
  tokenizing: ["tokenizing"],
  queued: ["queued_cold_start", "queued_higher_band", "queued_fairness", "queued_capacity", "queued_replica"],
  prefill: ["prefill"],
  decode: ["decode"],
  preempted: ["preempted"],
  migrated: ["migrated"],
  delivered: ["delivered"],
};
const KEY = "headway-operator-key";
const NUM_BATCHES = 3, NUM_SHOWN = 10;
const SILENCE_MS = 5000;
const RETRY_MS = 2000;
const SVG = "http://www.w3.org/2000/svg";

function shape(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

const plain = new Intl.NumberFormat("en");
function number(value) {
  return value === null || value === undefined ? "–" : plain.format(Math.round(value));
}

function milliseconds(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 7200000) return `${(value / 3600000).toFixed(1)} h`;
  if (value >= 60000) return `${(value / 60000).toFixed(1)} min`;
  return value >= 1000 ? `${(value / 1000).toFixed(2)} s` : `${value.toFixed(value < 10 ? 1 : 0)} ms`;
}

const seconds = value => milliseconds(value === null || value === undefined ? null : value * 1000);
const words = name => name.replaceAll("_", " ");

function facts(container, pairs) {
  list(container, pairs, pair => pair[0], pair => {
    const made = element("div");
    made.append(element("dt", "", pair[0]), element("dd"));
    return made;
  }, (child, pair) => {
    put(child.lastElementChild, pair[1]);
    child.lastElementChild.className = pair[2] ?? "";
  });
}

function row(labels, classes) {
  const made = element("tr");
  labels.forEach((label, index) => {
    const cell = element("td", classes[index]);
    cell.dataset.label = label;
    made.append(cell);
  });
  return made;
}

function texts(tr, values) {
  values.forEach((value, index) => put(tr.children[index], value));
}

function meter(cell, value, limit) {
  if (!cell.firstElementChild) {
    const made = element("div", "meter");
    const svg = shape("svg", {viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true"});
    svg.append(shape("rect", {x: 0, y: 0, height: 10, width: 0}));
    made.append(svg, element("span"));
    cell.append(made);
  }
  const [svg, label] = cell.firstElementChild.children;
  svg.firstElementChild.setAttribute("width", limit ? Math.min(100, 100 * value / limit) : 0);
  put(label, `${number(value)} / ${number(limit)}`);
}

function showTiles(data) {
  const sum = name => data.replicas.reduce((total, replica) => total + replica[name], 0);
  const blocks = sum("num_blocks");
  const queued = data.queues.reduce((total, queue) => total + queue.num_requests, 0);
  facts($("tiles"), [
    ["Replicas", number(data.replicas.length)],
    ["Requests running", number(sum("num_running"))],
    ["Requests waiting", number(queued + sum("num_waiting"))],
    ["Output tokens/s", number(sum("generated_tokens_per_s"))],
    data.jobs
      ? ["Batches in progress", number(data.jobs.find(each => each.labels.state === "in_progress")?.value)]
      : ["Jobs process", "does not answer", "bad"],
    ["KV blocks held", blocks ? `${(100 * (1 - sum("num_free_blocks") / blocks)).toFixed(0)} %` : "–"],
  ]);
}

function stateOf(replica) {
  if (replica.is_draining) return ["draining", "bad"];
  if (replica.age_s > 5) return ["silent", "bad"];
  return replica.num_running ? ["busy", "good"] : ["idle", ""];
}

function showReplicas(data) {
  const labels = ["Replica", "State", "Slots", "KV blocks", "Waiting there", "Output tokens/s", "Report age", "Mostly chosen for"];
  const classes = ["wide", "", "wide", "wide", "number", "number", "number", "wide ellipsis"];
  $("no-replicas").hidden = data.replicas.length > 0;
  list($("replicas"), data.replicas, replica => replica.replica_id, () => row(labels, classes), (tr, replica) => {
    const [state, className] = stateOf(replica);
    put(tr.children[0], replica.replica_id);
    put(tr.children[1], state);
    tr.children[1].className = className;
    meter(tr.children[2], replica.num_running, replica.num_slots);
    meter(tr.children[3], replica.num_blocks - replica.num_free_blocks, replica.num_blocks);
    put(tr.children[4], number(replica.num_waiting));
    put(tr.children[5], number(replica.generated_tokens_per_s));
    put(tr.children[6], seconds(replica.age_s));
    const chosen = replica.chosen_for;
    put(tr.children[7], chosen ? `${words(chosen.reason)}, ${chosen.num_placements} of ${chosen.of}` : "–");
    tr.children[7].title = tr.children[7].textContent;
  });
}

function showQueues(data) {
  const labels = ["Band", "Requests", "Tokens", "Tenants", "Largest tenants"];
  const classes = ["", "number", "number", "number", "wide ellipsis"];
  // A band keeps to one line, so that what is below stays in its place.
  list($("queues"), data.queues, queue => queue.band, () => row(labels, classes), (tr, queue) => {
    const largest = queue.tenants.slice(0, 3).map(each => `${each.tenant} ${number(each.num_requests)}`).join(", ");
    texts(tr, [queue.band, number(queue.num_requests), number(queue.num_tokens), number(queue.num_tenants), largest || "–"]);
    tr.lastElementChild.title = largest;
  });
}

function showLatencies(data) {
  const labels = ["Band", "Requests", "TTFT p50", "TTFT p95", "TTFT target", "TPOT p50", "TPOT p95", "TPOT target"];
  list($("latencies"), data.latencies, each => each.band, () => row(labels, ["", ...Array(7).fill("number")]), (tr, each) => {
    texts(tr, [each.band, number(each.num_requests), seconds(each.ttft_s?.p50), seconds(each.ttft_s?.p95),
      seconds(each.ttft_target_s), seconds(each.tpot_s?.p50), seconds(each.tpot_s?.p95), seconds(each.tpot_target_s)]);
    const isLate = (found, target) => found && target !== null && found.p95 > target;
    tr.children[3].classList.toggle("bad", Boolean(isLate(each.ttft_s, each.ttft_target_s)));
    tr.children[6].classList.toggle("bad", Boolean(isLate(each.tpot_s, each.tpot_target_s)));
  });
}

function showAutoscaling(data) {
  const scaling = data.autoscaling;
  if (!scaling) return facts($("autoscaling"), [["State", "off"]]);
  const tokens = isDue => (scaling.waiting ?? []).filter(work => isDue === work.due_s <= scaling.target_drain_s)
    .reduce((total, work) => total + work.tokens, 0);
  facts($("autoscaling"), [
    ["Replicas wanted", number(scaling.desired_replicas)],
    ["Needed for the work", number(scaling.needed_replicas)],
    ["Replicas now", number(scaling.num_replicas)],
    ["Bounds", `${scaling.min_replicas} to ${scaling.max_replicas}`],
    ["Tokens due now", number(tokens(true))],
    ["Time to drain them", seconds(scaling.drain_s)],
    ["Target of that time", seconds(scaling.target_drain_s)],
    ["Tokens due later", number(tokens(false))],
    ["Tokens/s of a replica", number(scaling.replica_tokens_per_s)],
  ]);
}

// A count that was above zero stays on the page.
const seenCounts = new Set();

function showJobs(data) {
  if (!data.jobs) return facts($("jobs"), [["State", "the jobs process does not answer", "bad"]]);
  const named = {jobs: "Batches", batch_requests: "Lines", webhook_deliveries: "Webhooks"};
  const always = new Set(["in_progress", "completed", "succeeded", "failed", "delivered"]);
  const pairs = data.jobs.flatMap(({name, labels, value}) => {
    if (name === "batch_eta_seconds") return [["Waiting lines done in", value === null ? "–" : seconds(value)]];
    if (name === "jobs_storage_up") return [["Storage", value ? "works" : "failed", value ? "" : "bad"]];
    const label = Object.values(labels)[0];
    if (value) seenCounts.add(`${name} ${label}`);
    return always.has(label) || seenCounts.has(`${name} ${label}`) ? [[`${named[name] ?? words(name)} ${words(label ?? "")}`, number(value)]] : [];
  });
  facts($("jobs"), pairs);
}

function showBatches(data) {
  const labels = ["Batch", "Tenant", "Lines done", "Failed", "Webhook"];
  const classes = ["wide ellipsis", "ellipsis", "wide", "number", ""];
  $("batches-section").hidden = data.batches.length === 0;
  list($("batches"), data.batches.slice(0, NUM_BATCHES), batch => batch.id, () => row(labels, classes), (tr, batch) => {
    texts(tr, [batch.id, batch.tenant]);
    tr.children[0].title = batch.id;
    meter(tr.children[2], batch.num_completed + batch.num_failed, batch.num_lines);
    put(tr.children[3], number(batch.num_failed));
    put(tr.children[4], batch.has_webhook ? "at its end" : "none");
  });
}

function showStored(data) {
  const labels = ["Tenant", "Responses", "Conversations", "MiB", "Oldest response"];
  const classes = ["ellipsis", "number", "number", "number", "number"];
  const stored = data.stored, all = stored && `all ${number(stored.num_tenants)}`;
  $("stored-section").hidden = !stored?.num_tenants;
  const sizes = stored ? [{...stored, tenant: all, isSum: true}, ...stored.tenants] : [];
  list($("stored"), sizes, size => size.isSum ? "sum" : `tenant ${size.tenant}`, () => row(labels, classes), (tr, size) => {
    const oldest = size.oldest_response_at, age = oldest === null ? null : data.time_unix_s - oldest;
    texts(tr, [size.tenant, number(size.num_responses), number(size.num_conversations), number(size.num_bytes / 2 ** 20), seconds(age)]);
  });
}

const CHARTS = [
  {name: "Output tokens/s", lines: [{field: "tokens_per_s", className: "decode"}], format: number},
  {name: "Requests", lines: [{field: "num_running", label: "running", className: "prefill"},
    {field: "num_waiting", label: "waiting", className: "queued"}], format: number},
  {name: "KV blocks held", lines: [{field: "kv_usage", className: "tokenizing"}], most: 1, format: value => `${(100 * value).toFixed(0)} %`},
];
const LEAST_SPAN_S = 300, CHART = {width: 300, height: 80};

// A limit of a scale: 1, 2 or 5 times a power of ten.
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return power * [1, 2, 5, 10].find(step => value <= step * power);
}

function makeChart({name, lines}) {
  const made = element("figure"), caption = element("figcaption"), most = element("span", "most"), axis = element("p", "axis");
  const svg = shape("svg", {viewBox: `0 0 ${CHART.width} ${CHART.height}`, preserveAspectRatio: "none", role: "img", class: "chart"});
  for (const {className} of lines) svg.append(shape("polyline", {class: `line ${className}`}));
  caption.append(element("strong", "", name), ...lines.filter(line => line.label).map(line => element("span", `key ${line.className}`, line.label)), most);
  axis.append(element("span"), element("span", "", "now"));
  made.append(caption, svg, axis);
  return made;
}

function showHistory({history, time_unix_s: now}) {
  const span_s = Math.max(LEAST_SPAN_S, history.length ? now - history[0].time_unix_s : 0);
  list($("charts"), CHARTS, chart => chart.name, makeChart, (figure, {lines, most, format}) => {
    const [caption, svg, axis] = figure.children;
    put(axis.firstElementChild, `${Math.round(span_s / 60)} min ago`);
    const limit = most ?? roundUp(Math.max(0, ...lines.flatMap(line => history.map(sample => sample[line.field]))));
    put(caption.lastElementChild, format(limit));
    lines.forEach(({field}, index) => {
      const points = history.map(sample => [CHART.width * (1 - (now - sample.time_unix_s) / span_s), CHART.height * (1 - sample[field] / limit)]);
      svg.children[index].setAttribute("points", points.map(point => point.map(value => value.toFixed(1)).join()).join(" "));
    });
    const last = history.at(-1), text = ({field, label}) => `${label ?? "now"} ${format(last?.[field] ?? 0)}`;
    svg.setAttribute("aria-label", `${caption.firstElementChild.textContent} over the last hour: ${lines.map(text).join(", ")}, scale to ${format(limit)}`);
  });
}

const partsOf = (metrics, group) => GROUPS[group].reduce((total, part) => total + metrics.parts_ms[part], 0);

function makeRequest() {
  const made = element("li"), details = element("details"), summary = element("summary");
  const bar = shape("svg", {viewBox: "0 0 1000 10", preserveAspectRatio: "none", role: "img", class: "bar"});
  for (const group of Object.keys(GROUPS)) bar.append(shape("rect", {y: 0, height: 10, class: group}));
  summary.append(element("span", "state"), element("span"), element("span"), bar, element("span", "total"),
    element("span", "longest"));
  details.append(summary, element("dl", "facts"));
  made.append(details);
  return made;
}

// All bars have one scale: that of the longest request that is shown.
function showRequest(li, request, longest_ms) {
  const {metrics} = request, details = li.firstElementChild, [summary, more] = details.children;
  const [state, tenant, band, bar, total, longest] = summary.children;
  put(state, request.status === "running" ? words(request.part ?? "running").replace(/^queued .*/, "queued") : request.status);
  state.className = `state ${request.status === "failed" ? "bad" : ""}`;
  put(tenant, request.tenant);
  put(band, request.band);
  put(total, milliseconds(metrics.total_ms));
  const [part, spent] = Object.entries(metrics.parts_ms).reduce((most, each) => each[1] > most[1] ? each : most);
  put(longest, `${words(part)}: ${milliseconds(spent)}`);
  let x = 0;
  Object.keys(GROUPS).forEach((group, index) => {
    const width = longest_ms ? 1000 * partsOf(metrics, group) / longest_ms : 0;
    bar.children[index].setAttribute("x", x);
    bar.children[index].setAttribute("width", width);
    x += width;
  });
  bar.setAttribute("aria-label", `longest part: ${longest.textContent}`);
  if (!details.open) return;
  facts(more, [
    ["Id", request.id],
    ["Tokens in, cached, out", `${number(request.prompt_tokens)}, ${number(metrics.cached_tokens)}, ${number(request.completion_tokens)}`],
    ["Answer", request.error_code ?? (request.http_status ? String(request.http_status) : "not yet"), request.error_code ? "bad" : ""],
    ["Replicas", metrics.placements.map(placed => `${placed.replica_id} (${words(placed.reason)})`).join(", ") || "none yet"],
    ["Preempted, migrated", `${metrics.num_preemptions} times, ${metrics.num_migrations} times`],
    ...Object.entries(metrics.parts_ms).filter(each => each[1] > 0).map(([name, value]) => [words(name), milliseconds(value)]),
  ]);
}

let latest = null;

let showsAll = false;

function showRequests() {
  const num = latest.requests.length, shown = showsAll ? latest.requests : latest.requests.slice(0, NUM_SHOWN);
  const longest_ms = Math.max(0, ...shown.map(request => request.metrics.total_ms));
  $("no-requests").hidden = num > 0;
  $("heads").hidden = num === 0;
  $("more").hidden = num <= NUM_SHOWN;
  put($("more"), showsAll ? "Show fewer" : `Show all ${num}`);
  put($("scale"), `Time by part, 0 to ${milliseconds(longest_ms)}`);
  list($("requests"), shown, request => `${request.response_id ?? `${request.id} ${request.created}`}`, request => {
    const made = makeRequest();
    made.firstElementChild.addEventListener("toggle", () => showRequests());
    return made;
  }, (li, request) => showRequest(li, request, longest_ms));
}

$("more").addEventListener("click", () => {
  showsAll = !showsAll;
  $("more").setAttribute("aria-expanded", String(showsAll));
  showRequests();
});

function show(data) {
  latest = data;
  $("main").hidden = false;
  put($("model"), data.model);
  document.title = `${data.model} – Headway`;
  for (const part of [showTiles, showHistory, showReplicas, showQueues, showLatencies, showAutoscaling, showJobs, showBatches, showStored, showRequests]) part(data);
}

function connection(text, isBad) {
  put($("connection"), text);
  $("connection").className = isBad ? "bad" : "";
}

async function read(response, abort) {
  let silent = setTimeout(() => abort.abort(), SILENCE_MS);
  for await (const events of eventsOf(response)) {
    clearTimeout(silent);
    silent = setTimeout(() => abort.abort(), SILENCE_MS);
    if (!events.length) continue;
    show(JSON.parse(events.pop()));
    connection(`live, ${new Date(latest.time_unix_s * 1000).toLocaleTimeString()}`, false);
  }
}

async function askForOperatorsKey(error) {
  const hadKey = "authorization" in withKey(KEY);
  connection("needs a key", false);
  await askForKey(KEY, "This server has API keys. The dashboard needs an operator's:", hadKey ? error : "");
}

async function connect() {
  const abort = new AbortController();
  try {
    const response = await fetch("/dashboard/events", {headers: withKey(KEY), signal: abort.signal, cache: "no-store"});
    if (response.status === 401 || response.status === 403) {
      await askForOperatorsKey(await errorOf(response));
      return connect();
    }
    if (!response.ok) throw new Error(await errorOf(response));
    await read(response, abort);
    connection("the server has ended the stream; trying again", true);
  } catch (error) {
    connection(`not connected: ${error.message}; trying again`, true);
  }
  setTimeout(connect, RETRY_MS);
}

for (const group of Object.keys(GROUPS)) {
  const made = element("li"), swatch = shape("svg", {viewBox: "0 0 12 12", "aria-hidden": "true"});
  swatch.append(shape("rect", {width: 12, height: 12, rx: 2, class: group}));
  made.append(swatch, group);
  $("legend").append(made);
}
connect();
describeServer();
