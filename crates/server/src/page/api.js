// Talks to the server that the page came from, and says in sentences what went wrong.

import { key } from "./store.js";

/** An error whose message is for people. */
export class Failure extends Error {}

export const models = async () => (await (await call("v1/models")).json()).data ?? [];
export const slots = async (signal) => (await call("slots", { signal })).json();

/** The chunks of an answer as they come. */
export async function* answer(body, signal) {
    const request = { ...body, stream: true, stream_options: { include_usage: true } };
    const response = await call("v1/chat/completions", { method: "POST", body: JSON.stringify(request), signal });
    for await (const line of lines(response.body)) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        let chunk;
        try {
            chunk = JSON.parse(data);
        } catch {
            throw new Failure("The server sent something that is not an answer.");
        }
        if (chunk.error) throw new Failure(sentence(0, chunk.error));
        yield chunk;
    }
    throw new Failure("The connection ended before the answer did.");
}

async function* lines(body) {
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
        let part;
        try {
            part = await reader.read();
        } catch (error) {
            if (error.name === "AbortError") throw error;
            throw new Failure("The connection to the server broke.");
        }
        if (part.done) return;
        const whole = (rest + part.value).split(/\r?\n/);
        rest = whole.pop();
        yield* whole;
    }
}

async function call(path, options = {}) {
    const headers = { "content-type": "application/json" };
    if (key()) headers.authorization = `Bearer ${key()}`;
    let response;
    try {
        response = await fetch(path, { ...options, headers, cache: "no-store" });
    } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new Failure("The server cannot be reached. It may have been stopped.");
    }
    if (response.ok) return response;
    const body = await response.json().catch(() => ({}));
    throw new Failure(sentence(response.status, body.error ?? {}, response.headers.get("retry-after")));
}

function sentence(status, error, wait) {
    const said = typeof error === "string" ? error : error.message;
    const detail = said ? ` ${said[0].toUpperCase()}${said.slice(1).replace(/\.?$/, ".")}` : "";
    if (error.code === "context_length_exceeded") return `The conversation is too long for the model.${detail}`;
    switch (status) {
        case 401:
        case 403:
            return "The server wants an API key, or another one. Enter it in the settings.";
        case 404:
            return detail.trim() || "The server does not have this.";
        case 413:
            return "The conversation is larger than the server accepts.";
        case 429:
            return `The server is busy. Try again in ${Number(wait) > 0 ? `${wait} s` : "a moment"}.`;
        case 503:
            return "The server is still loading the model, or is about to stop. Try again in a moment.";
        default:
            return detail.trim() || `The server could not answer (status ${status}).`;
    }
}
