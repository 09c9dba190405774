// The doctor on a button: one verdict, its evidence, and what to do next.

import { h } from "./dom.js";
import { ask, error } from "./parts.js";

const TONES = { healthy: "ok", "under-replicated": "warn", "partition-imbalance": "warn" };

export function doctor(name, draw) {
  let group = "";
  let isAsking = false;
  let said = null;
  let failure = null;

  async function diagnose() {
    isAsking = true;
    failure = null;
    draw();
    try {
      const query = group ? `?${new URLSearchParams({ group })}` : "";
      said = { ...(await ask(`/api/doctor/${encodeURIComponent(name)}${query}`)), group, at: new Date() };
    } catch (problem) {
      failure = problem.message;
    }
    isAsking = false;
    draw();
  }

  function close() {
    said = failure = null;
    draw();
  }

  return {
    button(state) {
      const readers = (state.groups?.groups ?? []).filter((line) => line.topics.includes(name)).map((line) => line.group);
      return h("span", { class: "doctor" },
        readers.length > 0 && h("select", { "aria-label": "Group to look at", onchange: (event) => { group = event.target.value; } },
          h("option", { value: "" }, "any group"), readers.map((one) => h("option", { value: one, "data-key": one, selected: one === group }, one))),
        h("button", { type: "button", class: "main", disabled: isAsking, onclick: diagnose }, isAsking ? "Examining…" : "Diagnose"));
    },
    draw() {
      if (failure) return error(failure);
      if (!said) return null;
      return h("section", { class: `panel verdict ${TONES[said.verdict] ?? "bad"}`, "aria-label": "Diagnosis", role: "status" },
        h("header", null, h("h2", null, said.verdict), h("span", { class: "muted" }, `${said.group ? `group ${said.group}, ` : ""}${said.at.toLocaleTimeString()}`), h("button", { type: "button", class: "plain", onclick: close }, "Close")),
        h("p", null, said.summary),
        said.evidence?.length > 0 && h("ul", null, said.evidence.map((one) => h("li", null, evidence(one)))),
        said.next_step && h("p", null, h("strong", null, "Next: "), said.next_step));
    },
  };
}

function evidence(one) {
  if (typeof one === "string") return one;
  const { text, summary, what, ...rest } = one;
  const words = Object.entries(rest).filter(([, value]) => value !== null && typeof value !== "object").map(([key, value]) => `${key}: ${value}`).join(", ");
  return [text ?? summary ?? what ?? "", words && h("span", { class: "muted" }, ` ${words}`)];
}
