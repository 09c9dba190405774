// Who is logged in, and the way back to the log-in form.

const RENEW_MS = 5 * 60 * 1000; // A session without a request for 30 minutes ends. An open page is in use.

let csrf = null;
let isLeaving = false;

// Shows the log-in form at the same address. It leads back to this view.
export function leave() {
  if (isLeaving) return;
  isLeaving = true;
  location.reload();
}

// Returns the session, or null if the node does not answer. Leaves the page if the session has ended.
export async function checkSession() {
  try {
    const response = await fetch("/api/session");
    if (!response.ok) return null;
    const known = await response.json();
    csrf = known.csrf ?? null;
    if (known.login && !known.principal) leave();
    return known;
  } catch {
    return null;
  }
}

export async function logOut() {
  await checkSession();
  const response = await fetch("/api/session", { method: "DELETE", headers: { "x-chronik-csrf": csrf ?? "" } }).catch(() => null);
  if (response?.ok) leave();
}

export function keepSession(onKnown) {
  const check = async () => {
    const known = await checkSession();
    if (known) onKnown(known);
  };
  check();
  setInterval(check, RENEW_MS);
}
