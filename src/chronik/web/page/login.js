// The log-in form. The address stays the same, so that a log-in leads back to the view that required it.

const form = document.getElementById("login");
const message = document.getElementById("message");
const button = form.querySelector("button");
let waitUntil = 0;

document.getElementById("place").textContent = location.host;

function say(line, tone) {
  message.textContent = line;
  message.className = `notice ${tone}`;
  message.hidden = !line;
}

async function session() {
  const response = await fetch("/api/session");
  const body = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(body.error ?? `the node answered ${response.status}`);
  return body;
}

// Another tab may have logged in meanwhile.
function enter(known) {
  if (known.login && !known.principal) return false;
  location.reload();
  return true;
}

async function logIn(user, password) {
  const known = await session();
  if (enter(known)) return;
  const response = await fetch("/api/session", {
    method: "POST",
    headers: { "content-type": "application/json", "x-chronik-csrf": known.csrf },
    body: JSON.stringify({ user, password }),
  });
  const body = await response.json().catch(() => ({}));
  if (response.ok) {
    location.reload();
    return;
  }
  const after = Number(response.headers.get("retry-after"));
  if (response.status === 429 && after > 0) waitUntil = Date.now() + after * 1000;
  const line = body.error ?? `the node answered ${response.status}`;
  throw new Error(`${line[0].toUpperCase()}${line.slice(1)}.`);
}

form.onsubmit = async (event) => {
  event.preventDefault();
  if (Date.now() < waitUntil) return;
  button.disabled = true;
  say("", "");
  try {
    await logIn(form.elements.user.value, form.elements.password.value);
  } catch (problem) {
    say(problem instanceof TypeError ? "This node did not answer. Try again when it is back." : problem.message, "bad");
    form.elements.password.value = "";
    form.elements.password.focus();
  }
  button.disabled = Date.now() < waitUntil;
};

setInterval(() => {
  const seconds = Math.ceil((waitUntil - Date.now()) / 1000);
  button.textContent = seconds > 0 ? `Wait ${seconds} s` : "Log in";
  if (waitUntil && seconds <= 0) {
    waitUntil = 0;
    button.disabled = false;
  }
}, 250);

session().then((known) => {
  if (!enter(known) && known.has_ended) say("Your session ended: log in again.", "warn");
}, () => {});
