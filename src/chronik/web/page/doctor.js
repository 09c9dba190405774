// The doctor on a button: one verdict, its evidence, and what to do next.

import { h } from "./dom.js";
import { duration } from "./format.js";
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
        h("p", null, `${said.summary[0].toUpperCase()}${said.summary.slice(1)}.`),
        said.evidence.length > 0 && h("ul", null, said.evidence.map((one) => h("li", null, one.text, one.since_s ? h("span", { class: "muted" }, ` for ${duration(one.since_s * 1000)}`) : null))),
        said.also.length > 0 && h("p", { class: "muted" }, `Also: ${said.also.join(", ")}.`),
        h("p", null, h("strong", null, "Next: "), said.next_step),
        said.notes.length > 0 && h("p", { class: "muted" }, said.notes.join("; ")));
    },
  };
}
