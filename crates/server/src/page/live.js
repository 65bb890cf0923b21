// The live view: who is being answered, what memory is in use, how fast it goes.

import { slots } from "./api.js";
import { element } from "./markdown.js";

const EVERY = 1000;
const REMEMBERED = 90;

const histories = new Map(); // model to its last counts
let polling = null;

/** Asks the server once a second while the view is open and the page can be seen. */
export function watch(container, isOpen) {
    polling?.abort();
    polling = null;
    if (!isOpen || document.hidden) return;
    polling = new AbortController();
    poll(container, polling.signal);
}

async function poll(container, signal) {
    while (!signal.aborted) {
        try {
            const status = await slots(signal);
            const models = (status.models ?? []).map((entry) => model(entry, status.uptime_seconds));
            container.replaceChildren(...(models.length ? models : [note("No model is loaded.")]));
        } catch (error) {
            if (signal.aborted) return;
            container.replaceChildren(note(error.message));
        }
        await new Promise((resolve) => setTimeout(resolve, EVERY));
    }
}

function model(status, uptime) {
    const name = status.model ?? "model";
    const { generated_tokens_total: generated, prompt_tokens_total: prompt, slots = [] } = status;
    const past = [...(histories.get(name) ?? []), { at: uptime, generated, prompt }].slice(-REMEMBERED);
    histories.set(name, past);
    const title = status.state && status.state !== "ready" ? `${name} (${status.state})` : name;
    return element(
        "section",
        {},
        element("h3", {}, title),
        numbers([
            ["running", count(status.running)],
            ["waiting", count(status.waiting)],
            ["tokens/s", rate(perSecond(past, "generated", 2))],
            // Prompts are counted when they are done, a whole one at once.
            ["prompt tokens/s", rate(perSecond(past, "prompt", 10))],
        ]),
        sparkline(past.slice(1).map((_, i) => perSecond(past.slice(i, i + 2), "generated", 1) || 0)),
        memory(status),
        slots.length ? table(slots) : note("Nobody is being answered."),
    );
}

/** How fast a count has grown over the last polls. */
function perSecond(past, field, polls) {
    const [from, to] = [past.at(-1 - polls) ?? past[0], past.at(-1)];
    return to.at > from.at ? (to[field] - from[field]) / (to.at - from.at) : NaN;
}

function numbers(pairs) {
    const cells = pairs.map(([label, value]) => element("div", {}, element("dd", {}, value), element("dt", {}, label)));
    return element("dl", { className: "numbers" }, ...cells);
}

function sparkline(rates) {
    const most = Math.max(...rates, 1);
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
    const points = rates.map((y, i) => `${REMEMBERED - rates.length + i},${(29 - (27 * y) / most).toFixed(1)}`);
    svg.setAttribute("viewBox", `0 0 ${REMEMBERED - 1} 30`);
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("class", "sparkline");
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", `Tokens a second in the last ${rates.length} seconds, at most ${rate(most)}`);
    line.setAttribute("points", points.join(" "));
    svg.append(line);
    return svg;
}

function memory({ kv_held_bytes: used, kv_cached_bytes: cached, kv_limit_bytes: limit }) {
    if (!(limit > 0)) return "";
    const bar = element("div", { className: "memory" }, part("used", used, limit), part("cached", cached, limit));
    const text = `KV cache: ${bytes(used)} in use, ${bytes(cached)} kept for later, of ${bytes(limit)}`;
    return element("div", {}, bar, note(text));
}

function part(name, value, limit) {
    const node = element("span", { className: name });
    node.style.width = `${Math.min(100, (100 * (value || 0)) / limit).toFixed(2)}%`;
    return node;
}

function table(slots) {
    const head = ["request", "prompt", "answer", "per s", "state"].map((name) => element("th", {}, name));
    const rows = slots.map((slot) => {
        const cells = [
            // The end of a name tells it from others.
            element("td", { className: "id", title: slot.id ?? "" }, String(slot.id ?? "").slice(-8)),
            element("td", {}, count(slot.prompt_tokens)),
            element("td", {}, count(slot.generated_tokens)),
            element("td", {}, rate(slot.tokens_per_second)),
            element("td", {}, slot.state ?? ""),
        ];
        return element("tr", {}, ...cells);
    });
    const all = element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows));
    return element("div", { className: "table" }, all);
}

const note = (text) => element("p", { className: "note" }, text);
const count = (n) => (Number.isFinite(n) ? n.toLocaleString("en") : "–");
const rate = (n) => (Number.isFinite(n) ? n.toFixed(n < 10 ? 1 : 0) : "–");

function bytes(n) {
    if (!Number.isFinite(n)) return "–";
    const units = ["B", "kB", "MB", "GB"];
    const unit = Math.min(Math.floor(Math.log10(Math.max(n, 1)) / 3), units.length - 1);
    return `${(n / 1000 ** unit).toFixed(unit > 1 && n / 1000 ** unit < 100 ? 1 : 0)} ${units[unit]}`;
}
