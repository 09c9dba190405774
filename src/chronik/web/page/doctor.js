// The doctor's button and its diagnosis: one verdict, its evidence, and the next step.

import { h } from "./dom.js";
import { duration } from "./format.js";
import { error, getJson } from "./parts.js";

const TONES = { healthy: "ok", "under-replicated": "warn", "partition-imbalance": "warn", "open-transaction": "warn" };

export function doctor(name, draw) {
  let group = "";
  let isRunning = false;
  let startedAt = 0;
  let diagnosis = null;
  let failure = null;

  async function diagnose() {
    isRunning = true;
    startedAt = Date.now();
    failure = null;
    draw();
    try {
      const query = group ? `?${new URLSearchParams({ group })}` : "";
      diagnosis = { ...(await getJson(`/api/doctor/${encodeURIComponent(name)}${query}`)), group, at: new Date() };
    } catch (problem) {
      failure = problem.message;
    }
    isRunning = false;
    draw();
  }

  function close() {
    diagnosis = failure = null;
    draw();
  }

  return {
    button(state) {
      const consumers = (state.groups?.groups ?? []).filter((line) => line.topics.includes(name)).map((line) => line.group);
      return h("span", { class: "doctor" },
        consumers.length > 0 && h("select", { "aria-label": "Group to examine", onchange: (event) => { group = event.target.value; } },
          h("option", { value: "" }, "any group"), consumers.map((one) => h("option", { value: one, "data-key": one, selected: one === group }, one))),
        h("button", { type: "button", class: "main", disabled: isRunning, onclick: diagnose }, isRunning ? `Examining… ${Math.round((Date.now() - startedAt) / 1000)} s` : "Diagnose"));
    },
    draw() {
      if (failure) return error(failure);
      if (!diagnosis) return null;
      return h("section", { class: `panel verdict ${TONES[diagnosis.verdict] ?? "bad"}`, "aria-label": "Diagnosis", role: "status" },
        h("header", null, h("h2", null, diagnosis.verdict), h("span", { class: "muted" }, `${diagnosis.group ? `group ${diagnosis.group}, ` : ""}${diagnosis.at.toLocaleTimeString()}`), h("button", { type: "button", class: "plain", onclick: close }, "Close")),
        h("p", null, `${diagnosis.summary[0].toUpperCase()}${diagnosis.summary.slice(1)}.`),
        diagnosis.evidence.length > 0 && h("ul", null, diagnosis.evidence.map((one) => h("li", null, one.text, one.since_s ? h("span", { class: "muted" }, ` for ${duration(one.since_s * 1000)}`) : null))),
        diagnosis.also.length > 0 && h("p", { class: "muted" }, `Also: ${diagnosis.also.join(", ")}.`),
        h("p", null, h("strong", null, "Next: "), diagnosis.next_step),
        diagnosis.notes.length > 0 && h("p", { class: "muted" }, diagnosis.notes.join("; ")));
    },
  };
}
