"use strict";
// Nothing in the data becomes markup: text is inserted as text nodes only.

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const svgSpace = byId("svg").namespaceURI;

function shape(tag, attributes = {}, text = "") {
  const element = document.createElementNS(svgSpace, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  return element;
}

function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  let text;
  if (size >= 10000) text = Math.round(value).toLocaleString("en");
  else if (size !== 0 && size < 1e-3) text = value.toExponential(1);
  else text = String(Number(value.toPrecision(size >= 1000 ? 4 : digits)));
  return text.replace("-", "−");
}

const fixed = (value) =>
  value === null || value === undefined ? "–" : value.toFixed(3).replace("-", "−");

const mean = (values) =>
  values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;

function showHead() {
  document.title = `isotherm: ${data.title}`;
  byId("title").textContent = data.title;
  for (const [name, value] of data.facts) {
    byId("facts").append(make("div", {}, make("dt", {}, name), make("dd", {}, value)));
  }
}

// The run's findings, each with a link to a kept trajectory as evidence.
function showFindings() {
  byId("findings-list").append(...data.findings.map(({ step, text, remedy, evidence }) => {
    const item = make("li", {}, `step ${step}: ${text}: ${remedy}`);
    if (evidence) {
      const link = new URLSearchParams(evidence);
      item.append(" ", make("a", { href: `#${link}` }, "see a trajectory"));
    }
    return item;
  }));
  byId("findings").hidden = false;
}

function showSettings() {
  byId("settings-table").append(make("tbody", {}, ...data.settings.map(([name, value]) =>
    make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, value)))));
  byId("settings").hidden = false;
}

function showEvaluations() {
  const { columns, rows } = data.evaluations;
  const head = columns.map((name) => make("th", { scope: "col" }, name));
  const body = rows.map(([metric, ...cells]) =>
    make("tr", {}, make("th", { scope: "row" }, metric.replaceAll("_", " ")),
      ...cells.map((cell) => make("td", {}, ...evaluationCell(cell)))));
  byId("evaluation-table").append(
    make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "metric"), ...head)),
    make("tbody", {}, ...body));
  byId("evaluations").hidden = false;
}

function evaluationCell(cell) {
  if (cell === null) return ["–"];
  if (cell.length < 3) return [number(cell[0])];
  const interval = `[${number(cell[1])}, ${number(cell[2])}]`;
  return [number(cell[0]), make("span", { class: "interval" }, interval)];
}

// Responses to each held-out problem, by evaluation.
function showResponses() {
  const blocks = data.responses.map((problem) => {
    const rows = problem.answers.map((answer) => make("tr", {},
      make("th", { scope: "row" }, answer.who), make("td", {}, number(answer.reward)),
      make("td", {}, `${answer.stop}, ${answer.tokens}`),
      make("td", { class: "said" }, answer.text)));
    const head = ["evaluation", "reward", "stop, tokens", "response"].map((name) =>
      make("th", { scope: "col" }, name));
    const source = problem.source ? `${problem.source}:` : "problem ";
    const summary = make("summary", {}, `${source}${problem.line} `,
      make("span", { class: "hint" }, problem.prompt.slice(0, 120)));
    return make("details", { class: "problem" }, summary,
      make("pre", { class: "asked" }, problem.prompt),
      make("p", { class: "hint" }, problem.answer == null ? "" : `its answer: ${problem.answer}`),
      make("div", { class: "scroll" }, make("table", {},
        make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows))));
  });
  byId("responses").append(...blocks);
  byId("evaluations").hidden = false;
}

// Comparison with another run. Sections that show only this run have its name in their titles.
function showAgainst() {
  const { names, differ } = data.against;
  const head = ["", ...names].map((name) => make("th", { scope: "col" }, name));
  const rows = differ.map(([name, ...values]) => make("tr", {},
    make("th", { scope: "row" }, name),
    ...values.map((value) => make("td", {}, value ?? "–"))));
  byId("against-table").append(
    make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows));
  byId("against-none").hidden = differ.length > 0;
  byId("against-table").hidden = !differ.length;
  byId("against").hidden = false;
  for (const title of ["timeline-title", "rollouts-title"]) byId(title).append(` of ${names[0]}`);
}

showHead();
if (data.findings.length) showFindings();
if (data.against) showAgainst();
if (data.settings.length) showSettings();
if (data.evaluations) showEvaluations();
if (data.responses.length) showResponses();
