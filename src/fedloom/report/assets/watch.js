"use strict";
(() => {
  // The state of the runs above the report, asked for again and again; a report whose figures have changed is loaded anew,
  // with the page as the reader left it.
  const { state, group, version } = JSON.parse(document.getElementById("watched").textContent);
  const began = performance.now();
  const key = `fedloom watch ${location.search}`;
  const kept = JSON.parse(sessionStorage.getItem(key) ?? "null");
  sessionStorage.removeItem(key);
  history.scrollRestoration = "manual";

  const panel = document.createElement("div");
  panel.id = "watch";
  document.querySelector("header").after(panel);

  function element(name, text, attributes = {}) {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  }

  function time(seconds) {
    if (seconds < 59.5) return `${seconds < 9.5 ? Number(seconds.toPrecision(2)) : Math.round(seconds)} s`;
    const minutes = Math.round(seconds / 60);
    if (minutes < 60) return `${minutes} min`;
    if (minutes < 2880) return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
    return `${Math.round(minutes / 1440)} days`;
  }

  function row(run) {
    const line = element("tr", undefined, { class: run.state });
    const progress = element("td");
    const bar = element("span", undefined, { class: "bar" });
    const filled = element("i");
    filled.style.width = `${(100 * run.rounds) / Math.max(1, run.total)}%`;
    bar.append(filled);
    const still = run.state === "quiet" ? `, nothing new for ${time(run.quiet)}` : run.state === "finished" ? ", finished" : "";
    const damaged = "finished, but its files are damaged";
    progress.append(bar, element("small", run.state === "damaged" ? damaged : `${run.rounds} of ${run.total} rounds${still}`));
    const name = element("td");
    // It may be broken where the report breaks names, but in no number.
    for (const part of `${run.algorithm}, seed ${run.seed}`.split(/(?<=[_(=]|\.(?!\d))/)) name.append(part, element("wbr"));
    line.append(
      name,
      progress,
      element("td", run.score),
      element("td", run.best, { class: "wide" }),
      element("td", run.pace === null ? "–" : time(run.pace), { class: "wide" }),
      element("td", run.state === "running" && run.left !== null ? time(run.left) : "–"),
    );
    return line;
  }

  function section({ name, runs, heads }, alone) {
    const made = element("section");
    const head = element("div", undefined, { class: "head" });
    const title = element("h2", alone ? "Runs" : undefined);
    if (!alone) title.append(element("a", name, { href: `?group=${encodeURIComponent(name)}` }));
    const finished = runs.filter((run) => run.state === "finished").length;
    const going = runs.filter((run) => run.state === "running");
    const left = Math.max(0, ...going.map((run) => run.left ?? 0));
    head.append(title, element("p", `${finished} of ${runs.length} finished` + (left ? `, about ${time(left)} for those under way` : "")));
    const table = element("table");
    const titles = ["Run", "Progress", ...heads, "A round", "Time left"];
    const line = element("tr");
    titles.forEach((text, k) => line.append(element("th", text, k === 3 || k === 4 ? { class: "wide" } : {})));
    const top = element("thead");
    top.append(line);
    const body = element("tbody");
    body.append(...runs.map(row));
    table.append(top, body);
    const scroll = element("div", undefined, { class: "scroll" });
    scroll.append(table);
    made.append(head, scroll);
    return made;
  }

  function show(now) {
    const shown = group === null ? now.groups : now.groups.filter((one) => one.name === group);
    const parts = shown.filter((one) => one.runs.length).map((one) => section(one, group !== null));
    if (group !== null && now.groups.length > 1) {
      const back = element("p", undefined, { class: "caption" });
      back.append(element("a", "All runs", { href: "/" }));
      parts.unshift(back);
    }
    panel.replaceChildren(...parts);
  }

  function lost() {
    if (!panel.querySelector(".lost")) {
      panel.prepend(element("section", "fedloom watch has ended: what you see stays as it is.", { class: "lost" }));
    }
  }

  // What the reader has done to the page: methods hidden, choices made, tables sorted, and how far it is scrolled.
  function keep() {
    sessionStorage.setItem(key, JSON.stringify({
      scroll: scrollY,
      hidden: [...document.querySelectorAll('.chip[aria-pressed="false"]')].map((chip) => chip.dataset.method),
      chosen: [...document.querySelectorAll('.choice button[aria-pressed="true"]')].map(({ dataset }) => [dataset.choice, dataset.value]),
      sorted: [...document.querySelectorAll("main table")].map((table) => {
        const cells = [...table.querySelectorAll("th[aria-sort]")];
        const at = cells.findIndex((cell) => cell.getAttribute("aria-sort") !== "none");
        return at < 0 ? null : [at, cells[at].getAttribute("aria-sort")];
      }),
    }));
  }

  function restore() {
    if (kept === null) return;
    for (const chip of document.querySelectorAll(".chip")) if (kept.hidden.includes(chip.dataset.method)) chip.click();
    for (const [choice, value] of kept.chosen) {
      const button = [...document.querySelectorAll(".choice button")].find(({ dataset }) => dataset.choice === choice && dataset.value === value);
      if (button && button.getAttribute("aria-pressed") !== "true") button.click();
    }
    [...document.querySelectorAll("main table")].forEach((table, k) => {
      const [at, order] = kept.sorted[k] ?? [];
      const cell = [...table.querySelectorAll("th[aria-sort]")][at];
      for (let tries = 0; cell && cell.getAttribute("aria-sort") !== order && tries < 2; tries++) cell.querySelector("button").click();
    });
    scrollTo(0, kept.scroll);
  }

  let busy = false;
  addEventListener("pointerdown", () => (busy = true));
  addEventListener("pointerup", () => (busy = false));

  async function follow() {
    try {
      const now = await (await fetch("/state")).json();
      show(now);
      const mine = group === null ? (now.groups.length === 1 ? now.groups[0] : null) : now.groups.find(({ name }) => name === group);
      const changed = mine && mine.version !== version && mine.runs.some((run) => run.rounds);
      const drawn = document.documentElement.dataset.drawn === "all";
      const idle = !busy && !document.hidden && getSelection().isCollapsed;
      if (changed && drawn && idle && performance.now() - began > 1000 * now.refresh) {
        keep();
        location.reload();
        return;
      }
    } catch {
      lost();
    }
    setTimeout(follow, document.hidden ? 5000 : 1500);
  }

  show(state);
  restore();
  setTimeout(follow, 1500);
})();
