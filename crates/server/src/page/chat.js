// The page: conversations on the left, the open one in the middle, settings and the live view on the right.

import * as api from "./api.js";
import * as store from "./store.js";
import { watch } from "./live.js";
import { copyText, element, render } from "./markdown.js";

const $ = (id) => document.getElementById(id);
const EXAMPLES = [
    "Explain photosynthesis to a child.",
    "Write a haiku about mountains.",
    "Compare tea and coffee in a table.",
];

let chat = store.newChat();
const answering = new Map(); // conversation's id to what stops its answer
const views = new WeakMap(); // message to how it is shown

// Answers

/** Asks for an answer to all that has been said. */
async function ask(of) {
    const message = { role: "assistant", content: "", reasoning: "" };
    const body = request(of);
    of.messages.push(message);
    of.changed = Date.now();
    const stop = new AbortController();
    answering.set(of.id, stop);
    keep(of);
    if (of === chat) showMessages();
    say("Answering");
    const clock = { asked: performance.now(), tokens: 0 };
    try {
        for await (const chunk of api.answer(body, stop.signal)) take(message, chunk, clock);
        if (!message.content && !message.reasoning) message.note = "The answer is empty.";
        say("The answer is complete");
    } catch (error) {
        if (error.name === "AbortError") message.note = "Stopped";
        else if (error instanceof api.Failure) message.error = error.message;
        else throw error;
        say(message.error ?? "Stopped");
    } finally {
        stop.abort(); // what follows an error is not wanted
        answering.delete(of.id);
        message.stats = stats(clock);
        of.changed = Date.now();
        keep(of);
        if (of === chat) showMessages();
    }
}

/** Whether settings make sense; if one does not, it is shown. */
function areSettingsValid() {
    if ($("form").checkValidity()) return true;
    open("settings", true);
    return $("form").reportValidity();
}

function request(of) {
    const { system, ...sampling } = store.settings();
    const messages = system ? [{ role: "system", content: system }] : [];
    for (const [i, { role, content }] of of.messages.entries()) {
        // A question without an answer would make two in a row, which templates refuse.
        const isUnanswered = role === "user" && of.messages[i + 1] && !of.messages[i + 1].content;
        if (content && !isUnanswered) messages.push({ role, content });
    }
    return { model: $("model").value, messages, ...sampling };
}

function take(message, chunk, clock) {
    const choice = chunk.choices?.[0];
    const { content, reasoning_content: reasoning } = choice?.delta ?? {};
    if (content || reasoning) {
        clock.last = performance.now();
        clock.first ??= clock.last;
        clock.tokens++;
        message.reasoning += reasoning ?? "";
        message.content += content ?? "";
        refresh(message, clock);
    }
    if (choice?.finish_reason === "length") message.note = "Ended by the limit of tokens or of the context";
    clock.usage = chunk.usage ?? clock.usage;
    clock.timings = chunk.timings ?? clock.timings;
}

/** The server's own figures where it gives them, else what was measured here. */
function stats({ asked, first, last, tokens, usage, timings }) {
    if (!first) return null;
    const measured = tokens > 1 ? ((tokens - 1) * 1000) / (last - first) : null;
    return {
        rate: timings?.predicted_per_second || measured,
        first: (first - asked) / 1000,
        tokens: usage?.completion_tokens ?? tokens,
        prompt: usage?.prompt_tokens,
        cached: usage?.prompt_tokens_details?.cached_tokens,
    };
}

function send(text) {
    if (!text.trim() || answering.has(chat.id) || !areSettingsValid()) return false;
    if (!chat.messages.length) chat.title = text.trim().split("\n")[0].slice(0, 80);
    chat.messages.push({ role: "user", content: text.trim() });
    ask(chat);
    return true;
}

/** Asks the last question again, or another one in its place. */
function again(text) {
    const at = chat.messages.findLastIndex((message) => message.role === "user");
    if (at < 0 || answering.has(chat.id) || !areSettingsValid()) return;
    if (text?.trim()) chat.messages[at] = { role: "user", content: text.trim() };
    chat.messages.length = at + 1;
    ask(chat);
}

// Messages

function showMessages() {
    const follow = isAtEnd();
    const last = chat.messages.findLastIndex((message) => message.role === "user");
    $("messages").replaceChildren(...chat.messages.map((message, i) => view(message, i >= last)));
    $("empty").hidden = chat.messages.length > 0;
    const busy = answering.has(chat.id);
    $("send").classList.toggle("busy", busy);
    $("send").setAttribute("aria-label", busy ? "Stop" : "Send");
    $("send").title = busy ? "Stop (Escape)" : "Send";
    $("send").querySelector("use").setAttribute("href", busy ? "#i-stop" : "#i-send");
    document.title = chat.messages.length ? `${chat.title} · puna` : "puna";
    showSpeed(chat.messages.at(-1)?.stats);
    if (follow || busy) toEnd();
    showList();
}

function view(message, isLast) {
    const body = element("div", { className: "text" });
    const node = element("article", { className: message.role });
    node.setAttribute("aria-label", message.role === "user" ? "Question" : "Answer");
    const view = { body };
    views.set(message, view);
    if (message.role === "user") {
        body.textContent = message.content;
    } else {
        view.thoughts = element("div", { className: "text" });
        view.reasoning = element("details", {}, element("summary"), view.thoughts);
        node.append(view.reasoning);
        fill(message, view);
    }
    node.append(body);
    if (message.error) node.append(element("p", { className: "error", role: "alert" }, message.error));
    if (!answering.has(chat.id) || !isLast) node.append(actions(message, isLast, node));
    return node;
}

/** Shows what an answer has so far. */
function fill(message, { body, reasoning, thoughts }) {
    const isGrowing = answering.has(chat.id) && message === chat.messages.at(-1);
    render(body, message.content);
    body.classList.toggle("growing", isGrowing && !message.content && !message.reasoning);
    if ((reasoning.hidden = !message.reasoning)) return;
    const isThinking = isGrowing && !message.content;
    if (reasoning.isThinking !== isThinking) {
        // Open while it thinks; from then on as the reader wants it.
        reasoning.isThinking = isThinking;
        reasoning.open = isThinking;
        reasoning.firstChild.textContent = isThinking ? "Thinking…" : "Thoughts";
    }
    render(thoughts, message.reasoning);
}

let frame = 0;

/** As [fill], once for all that comes between two frames. */
function refresh(message, clock) {
    if (message !== chat.messages.at(-1) || frame) return;
    const show = () => {
        frame = 0;
        const follow = isAtEnd();
        if (message === chat.messages.at(-1)) fill(message, views.get(message));
        showSpeed(stats(clock));
        if (follow) toEnd();
    };
    // A page that nobody sees has no frames.
    frame = document.hidden ? setTimeout(show, 500) : requestAnimationFrame(show);
}

function actions(message, isLast, node) {
    const row = element("div", { className: "actions" });
    const button = (label, act) => {
        const made = element("button", { type: "button", className: "quiet" }, label);
        made.addEventListener("click", () => act(made));
        row.append(made);
    };
    if (message.content) button("Copy", (made) => copyText(made, message.content));
    if (isLast && message.role === "user") button("Edit", () => edit(message, node));
    if (isLast && message.role === "assistant") button(message.error ? "Try again" : "Regenerate", () => again());
    const told = [message.note, ...figures(message.stats)].filter(Boolean).join(" · ");
    if (told) row.append(element("small", {}, told));
    return row;
}

function figures(stats) {
    if (!stats) return [];
    const { rate, first, tokens } = stats;
    return [`${tokens} token${tokens === 1 ? "" : "s"}`, rate && `${rate.toFixed(1)} tokens/s`, `first token after ${first.toFixed(2)} s`];
}

function showSpeed(stats) {
    $("speed").textContent = stats?.rate ? `${stats.rate.toFixed(1)} tokens/s` : "";
    const most = Number($("model").selectedOptions[0]?.dataset.length);
    const used = stats?.prompt ? stats.prompt + stats.tokens : 0;
    const of = most ? ` of ${most.toLocaleString("en")}` : "";
    $("context").textContent = used ? `${used.toLocaleString("en")}${of} tokens.` : "";
}

function edit(message, node) {
    const area = element("textarea", { value: message.content });
    area.setAttribute("aria-label", "Your question");
    const submit = element("button", { type: "submit" }, "Send");
    const cancel = element("button", { type: "button", className: "quiet" }, "Cancel");
    const form = element("form", { className: "edit" }, area, element("div", { className: "actions" }, submit, cancel));
    const close = () => {
        showMessages();
        $("question").focus();
    };
    cancel.addEventListener("click", close);
    form.addEventListener("submit", (event) => {
        event.preventDefault();
        again(area.value);
        $("question").focus();
    });
    area.addEventListener("keydown", (event) => {
        if (event.key === "Escape") close();
        else if (isSubmit(event)) form.requestSubmit();
        else return;
        event.preventDefault();
        event.stopPropagation();
    });
    area.addEventListener("input", () => grow(area));
    node.replaceChildren(form);
    grow(area);
    area.focus();
}

// Conversations

function showList() {
    const all = store.chats();
    if (chat.messages.length && !all.some(({ id }) => id === chat.id)) all.unshift(chat);
    $("list").replaceChildren(
        ...all.map((entry) => {
            const select = element("button", { className: "chat", title: entry.title }, entry.title);
            if (entry.id === chat.id) select.setAttribute("aria-current", "true");
            select.addEventListener("click", () => openChat(entry));
            const remove = element("button", { className: "icon remove", title: "Delete" }, icon("close"));
            remove.setAttribute("aria-label", `Delete ${entry.title}`);
            remove.addEventListener("click", () => confirm(`Delete “${entry.title}”?`) && forget([entry]));
            return element("li", {}, select, remove);
        }),
    );
}

const live = new Map(); // conversations that are being answered, as they are in memory

function openChat(entry) {
    chat = live.get(entry.id) ?? entry;
    open("chats", false);
    showMessages();
    toEnd();
    $("question").focus();
}

function keep(of) {
    if (answering.has(of.id)) live.set(of.id, of);
    else live.delete(of.id);
    if (!of.isForgotten && !store.saveChat(of)) {
        say("The browser has no room for more conversations: export and delete some.", true);
    }
}

function forget(entries) {
    for (const entry of entries) {
        const running = live.get(entry.id);
        if (running) running.isForgotten = true;
        answering.get(entry.id)?.abort();
        store.removeChat(entry);
    }
    if (entries.some(({ id }) => id === chat.id)) chat = store.newChat();
    showMessages();
}

function exportChats() {
    const file = new Blob([JSON.stringify(store.chats(), null, 1)], { type: "application/json" });
    const link = element("a", { href: URL.createObjectURL(file), download: "puna-conversations.json" });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// Around it

function icon(name) {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
    use.setAttribute("href", `#i-${name}`);
    svg.append(use);
    return svg;
}

/** Tells those who listen to the page, and where `visible` everybody. */
function say(text, visible = false) {
    $("status").textContent = text;
    $("status").classList.toggle("unseen", !visible);
}

function isAtEnd() {
    const { scrollHeight, scrollTop, clientHeight } = $("scroll");
    return scrollHeight - scrollTop - clientHeight < 60;
}

function toEnd() {
    $("scroll").scrollTop = $("scroll").scrollHeight;
}

function grow(area) {
    area.style.height = "auto";
    area.style.height = `${area.scrollHeight + area.offsetHeight - area.clientHeight}px`;
}

/** Enter, where there is a keyboard with Shift, and no word is being composed. */
function isSubmit(event) {
    return event.key === "Enter" && !event.shiftKey && !event.isComposing && !matchMedia("(pointer: coarse)").matches;
}

const PANELS = { chats: "menu", settings: "show-settings", live: "show-live" };

function open(name, wanted) {
    for (const [panel, button] of Object.entries(PANELS)) {
        const isOpen = panel === name ? wanted : $(button).getAttribute("aria-expanded") === "true" && !wanted;
        $(button).setAttribute("aria-expanded", isOpen);
        // Wide windows show the conversations always: style.css decides.
        if (panel === "chats") $(panel).classList.toggle("open", isOpen);
        else $(panel).hidden = !isOpen;
    }
    watch($("models"), !$("live").hidden);
}

const isOpen = (name) => $(PANELS[name]).getAttribute("aria-expanded") === "true";

function showTheme() {
    const chosen = store.theme();
    const isDark = chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    document.documentElement.dataset.theme = isDark ? "dark" : "light";
    $("theme").setAttribute("aria-pressed", isDark);
    $("theme").querySelector("use").setAttribute("href", isDark ? "#i-light" : "#i-dark");
}

async function showModels() {
    const chosen = $("model").value;
    try {
        const models = await api.models();
        const options = models.map(({ id, max_model_len: length }) => {
            const option = element("option", { value: id }, id);
            if (length) option.dataset.length = length;
            return option;
        });
        $("model").replaceChildren(...options);
        $("model").disabled = !models.length;
        if (models.some(({ id }) => id === chosen)) $("model").value = chosen;
        say("");
    } catch (error) {
        say(error.message, true);
        setTimeout(showModels, 3000);
    }
}

function settingsChanged() {
    const values = {};
    for (const field of $("form").elements) {
        if (!field.name || !field.value.trim() || !field.checkValidity()) continue;
        values[field.name] = field.type === "number" ? field.valueAsNumber : field.value;
    }
    store.saveSettings(values);
}

function start() {
    for (const [name, value] of Object.entries(store.settings())) {
        if ($("form").elements[name]) $("form").elements[name].value = value;
    }
    $("form").addEventListener("input", settingsChanged);
    $("form").addEventListener("submit", (event) => event.preventDefault());
    $("form").addEventListener("reset", () => setTimeout(settingsChanged));
    $("key").value = store.key();
    $("key").addEventListener("change", () => {
        store.saveKey($("key").value.trim());
        showModels();
    });

    const question = $("question");
    const submit = () => {
        if (!send(question.value)) return;
        question.value = "";
        grow(question);
    };
    $("composer").addEventListener("submit", (event) => {
        event.preventDefault();
        if (answering.has(chat.id)) answering.get(chat.id).abort();
        else submit();
    });
    question.addEventListener("input", () => grow(question));
    question.addEventListener("keydown", (event) => {
        if (!isSubmit(event)) return;
        event.preventDefault();
        submit();
    });
    addEventListener("keydown", (event) => {
        if (event.key !== "Escape") return;
        const panel = Object.keys(PANELS).find(isOpen);
        if (answering.has(chat.id)) answering.get(chat.id).abort();
        else if (panel) {
            open(panel, false);
            $(PANELS[panel]).focus();
        }
    });

    for (const [panel, button] of Object.entries(PANELS)) {
        $(button).addEventListener("click", () => open(panel, !isOpen(panel)));
        $(panel).querySelector(".close")?.addEventListener("click", () => {
            open(panel, false);
            $(button).focus();
        });
    }
    $("new").addEventListener("click", () => openChat(store.newChat()));
    $("export").addEventListener("click", exportChats);
    $("clear").addEventListener("click", () => confirm("Delete all conversations?") && forget(store.chats()));
    $("theme").addEventListener("click", () => {
        store.saveTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
        showTheme();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showTheme);
    $("scroll").addEventListener("scroll", () => ($("down").hidden = isAtEnd()));
    $("down").addEventListener("click", toEnd);
    for (const text of EXAMPLES) {
        const button = element("button", { className: "quiet" }, text);
        button.addEventListener("click", () => send(text));
        $("examples").append(button);
    }
    addEventListener("storage", showList);
    addEventListener("pagehide", () => live.forEach(keep));
    document.addEventListener("visibilitychange", () => watch($("models"), isOpen("live")));

    showTheme();
    showMessages();
    showModels();
}

start();
