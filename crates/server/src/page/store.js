// What the browser keeps: conversations, settings, colours. The API key only as long as the tab is open.

const CHAT = "puna.chat.";

/** Conversations, newest first. */
export function chats() {
    const keys = Object.keys(localStorage).filter((key) => key.startsWith(CHAT));
    const all = keys.map((key) => read(localStorage, key, null)).filter((chat) => chat && Array.isArray(chat.messages));
    return all.sort((a, b) => b.changed - a.changed);
}

export function newChat() {
    const id = `${Date.now().toString(36)}${Math.random().toString(36).slice(2, 8)}`;
    return { id, title: "New conversation", changed: Date.now(), messages: [] };
}

/** Returns whether there was room. */
export function saveChat(chat) {
    return write(localStorage, CHAT + chat.id, chat);
}

export function removeChat(chat) {
    localStorage.removeItem(CHAT + chat.id);
}

export const settings = () => read(localStorage, "puna.settings", {});
export const saveSettings = (values) => write(localStorage, "puna.settings", values);
export const key = () => read(sessionStorage, "puna.key", "");
export const saveKey = (value) => write(sessionStorage, "puna.key", value);
export const theme = () => read(localStorage, "puna.theme", null);
export const saveTheme = (value) => write(localStorage, "puna.theme", value);

function read(storage, name, otherwise) {
    try {
        return JSON.parse(storage.getItem(name)) ?? otherwise;
    } catch {
        return otherwise;
    }
}

function write(storage, name, value) {
    try {
        storage.setItem(name, JSON.stringify(value));
        return true;
    } catch {
        return false;
    }
}
