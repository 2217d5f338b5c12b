/** Puts the page together: what knows what, keys that work everywhere, and the first words with the server. */

import { Server } from "./api.js";
import { Chat } from "./chat.js";
import { ComposerView } from "./composer_view.js";
import { toast } from "./dom.js";
import { EngineView } from "./engine_view.js";
import { askForKey } from "./key_dialog.js";
import { LogView } from "./log_view.js";
import { lookSettings, requestSettings } from "./settings.js";
import { SettingsDialog } from "./settings_dialog.js";
import { SidebarView } from "./sidebar_view.js";
import { openStore } from "./store.js";
import { TopbarView } from "./topbar_view.js";
import { welcome } from "./welcome.js";

const AGAIN = 2000; // milliseconds until a server that is away or loading is asked again
const OPEN = "forerun.open"; // of sessionStorage: the conversation that a reload shows again
const page = document.documentElement;
const part = (id) => document.getElementById(id);

const look = lookSettings();
const settings = requestSettings();
const server = new Server(askForKey);
const store = await openStore();
const chat = new Chat(server, store, settings);
const log = new LogView(part("log"), chat, look, () => welcome((text) => chat.ask(text)));
const composer = new ComposerView(part("composer"), chat, log);
const sidebar = new SidebarView(part("sidebar"), chat, toggleSidebar);
const dialog = new SettingsDialog(settings);
const topbar = new TopbarView(part("topbar"), look, {
  toggleSidebar,
  newChat: () => chat.startNew(),
  toggleEngine: () => look.set({ engine: !look.values.engine }),
  openSettings: () => dialog.open(),
});
const engine = new EngineView(part("engine"), server, (state) => topbar.showStatus(state?.status ?? "away"));

function narrow() {
  return matchMedia("(max-width: 60rem)").matches;
}

/** A column on wide screens, a drawer on small ones. */
function toggleSidebar() {
  if (narrow()) openDrawer(page.dataset.drawer !== "open");
  else look.set({ sidebar: !look.values.sidebar });
}

function openDrawer(open) {
  page.dataset.drawer = open ? "open" : "closed";
  part("scrim").hidden = !open;
}

function follow() {
  if (look.values.sidebar) delete page.dataset.sidebar;
  else page.dataset.sidebar = "hidden";
  engine.show(look.values.engine);
}

function onKey(event) {
  if (event.isComposing || document.querySelector("dialog[open]")) return;
  const typing = event.target.matches("input, textarea");
  if (event.key.toLowerCase() === "k" && (event.ctrlKey || event.metaKey) && !event.shiftKey && !event.altKey) {
    event.preventDefault();
    chat.startNew();
    composer.focus();
  } else if (event.key === "Escape") {
    if (page.dataset.drawer === "open") openDrawer(false);
    else chat.stop();
  } else if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    composer.focus();
  }
}

/** Until the server has told what it serves. */
async function meetServer() {
  try {
    const props = await server.props();
    chat.model = props.model;
    topbar.showModel(props);
    topbar.showStatus("ready");
    dialog.know(props);
    composer.attaching.know(props);
    sidebar.version.textContent = props.version ? `v${props.version}` : "";
  } catch (error) {
    topbar.showStatus(error.status === 503 ? "loading" : "away");
    topbar.showProblem(error.status === 503 ? "Loading the model…" : error.message);
    if (error.status !== 401) setTimeout(meetServer, AGAIN);
  }
}

look.addEventListener("change", follow);
follow();
addEventListener("keydown", onKey);
addEventListener("pagehide", () => chat.rescueUnsaved());
part("scrim").addEventListener("click", () => openDrawer(false));
chat.addEventListener("open", () => openDrawer(false));
chat.addEventListener("unsaved", () =>
  toast("This conversation could not be saved: the browser’s storage is full or closed."),
);
await chat.load();
chat.addEventListener("open", () => sessionStorage.setItem(OPEN, chat.current.id));
chat.open(sessionStorage.getItem(OPEN));
meetServer();
if (!store.lasting) toast("This browser keeps nothing: conversations are gone when the page is closed.");
