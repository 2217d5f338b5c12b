/** Where conversations are kept: the browser's IndexedDB, or memory alone where that is closed (private windows). */

const NAME = "forerun";
const TABLE = "conversations";
const RESCUED = "forerun.rescued"; // of localStorage

export async function openStore() {
  try {
    return new BrowserStore(await open());
  } catch {
    return new MemoryStore();
  }
}

/**
 * Keeps conversations when the page is about to go away. A database may not finish by then; this is done when it
 * returns.
 */
export function rescue(conversations) {
  try {
    if (conversations.length) localStorage.setItem(RESCUED, JSON.stringify(conversations));
  } catch {
    // Too much for it: what the database has is all there is.
  }
}

/** What was kept that way, once. */
export function rescued() {
  try {
    return JSON.parse(localStorage.getItem(RESCUED) ?? "[]");
  } finally {
    localStorage.removeItem(RESCUED);
  }
}

function open() {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(TABLE, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
    request.onblocked = () => reject(new Error("blocked"));
  });
}

class BrowserStore {
  lasting = true;

  constructor(database) {
    this.database = database;
  }

  all() {
    return this.#run("readonly", (table) => table.getAll());
  }

  put(conversation) {
    return this.#run("readwrite", (table) => table.put(conversation));
  }

  remove(id) {
    return this.#run("readwrite", (table) => table.delete(id));
  }

  #run(mode, action) {
    return new Promise((resolve, reject) => {
      const transaction = this.database.transaction(TABLE, mode);
      const request = action(transaction.objectStore(TABLE));
      transaction.oncomplete = () => resolve(request.result);
      transaction.onerror = transaction.onabort = () => reject(transaction.error);
    });
  }
}

class MemoryStore {
  lasting = false;
  kept = new Map();

  async all() {
    return [...this.kept.values()];
  }

  async put(conversation) {
    this.kept.set(conversation.id, conversation);
  }

  async remove(id) {
    this.kept.delete(id);
  }
}
