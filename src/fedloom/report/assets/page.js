"use strict";
(() => {
  // Every slot: the choice that selects its variant (or null), and its variants by the choice's value.
  const slots = JSON.parse(document.getElementById("figures").textContent);
  const hidden = new Set();
  const chosen = {};
  const touch = window.matchMedia("(pointer: coarse)").matches;
  const settings = {
    responsive: true,
    displaylogo: false,
    displayModeBar: !touch,
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
  };

  function draw(name) {
    const element = document.getElementById(name);
    // A folded figure has no size: it is drawn when its section opens.
    if (element.closest("details:not([open])")) return;
    const { choice, variants } = slots[name];
    const first = Object.values(variants)[0];
    const figure = variants[chosen[choice]] ?? first;
    const traces = figure.data ?? first.data.map((trace, k) => ({ ...trace, ...figure.changes[k] }));
    const data = traces.map((trace) => ({ ...trace, visible: !hidden.has(trace.legendgroup) }));
    // On a touch screen a finger on a figure scrolls the page.
    // The chips are the legend of the methods; a figure of other lines brings its own.
    const layout = { showlegend: false, ...figure.layout, dragmode: touch ? false : "zoom" };
    Plotly.react(element, data, layout, settings);
  }

  function showMethods() {
    for (const chip of document.querySelectorAll(".chip")) {
      chip.setAttribute("aria-pressed", String(!hidden.has(chip.dataset.method)));
    }
    for (const row of document.querySelectorAll("tr[data-method]")) {
      row.classList.toggle("off", hidden.has(row.dataset.method));
    }
    Object.keys(slots).forEach(draw);
  }

  const chips = [...document.querySelectorAll(".chip")];
  for (const chip of chips) {
    const method = chip.dataset.method;
    chip.addEventListener("click", () => {
      if (!hidden.delete(method)) hidden.add(method);
      showMethods();
    });
    chip.addEventListener("dblclick", () => {
      const others = chips.map((other) => other.dataset.method).filter((other) => other !== method);
      const alone = others.every((other) => hidden.has(other));
      hidden.clear();
      if (!alone) others.forEach((other) => hidden.add(other));
      showMethods();
    });
  }

  for (const button of document.querySelectorAll(".choice button")) {
    const { choice, value } = button.dataset;
    chosen[choice] ??= value;
    button.addEventListener("click", () => {
      chosen[choice] = value;
      for (const other of document.querySelectorAll(".choice button")) {
        if (other.dataset.choice === choice) {
          other.setAttribute("aria-pressed", String(other.dataset.value === value));
        }
      }
      Object.keys(slots).filter((name) => slots[name].choice === choice).forEach(draw);
    });
  }

  // Sorting keeps empty cells last, whichever way.
  function sort(table, column, down) {
    const body = table.tBodies[0];
    const key = (row) => row.cells[column].dataset.value;
    const compare = (a, b) => (isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b);
    const rows = [...body.rows].sort((a, b) => {
      const [x, y] = [key(a), key(b)];
      if (x === undefined || y === undefined) return (x === undefined) - (y === undefined);
      return down ? compare(y, x) : compare(x, y);
    });
    body.append(...rows);
  }

  for (const button of document.querySelectorAll("th button")) {
    button.addEventListener("click", () => {
      const cell = button.closest("th");
      const now = cell.getAttribute("aria-sort");
      const first = cell.dataset.first;
      const order = now === "none" ? first : now === "ascending" ? "descending" : "ascending";
      for (const other of cell.parentElement.cells) other.setAttribute("aria-sort", "none");
      cell.setAttribute("aria-sort", order);
      sort(cell.closest("table"), cell.cellIndex, order === "descending");
    });
  }

  for (const button of document.querySelectorAll(".copy")) {
    button.addEventListener("click", async () => {
      const text = button.parentElement.querySelector("pre");
      try {
        await navigator.clipboard.writeText(text.textContent);
        button.textContent = "Copied";
      } catch {
        // Without the right to the clipboard, select the line so that one key copies it.
        getSelection().selectAllChildren(text);
      }
    });
  }

  // One figure at a time, so that the page can be read and scrolled while the others are drawn.
  const waiting = Object.keys(slots);
  function next() {
    const name = waiting.shift();
    if (name === undefined) {
      document.documentElement.dataset.drawn = "all";
      return;
    }
    draw(name);
    setTimeout(next);
  }
  next();

  for (const fold of document.querySelectorAll("details")) {
    fold.addEventListener("toggle", () => fold.querySelectorAll("figure > div").forEach(({ id }) => draw(id)));
  }

  function resize() {
    for (const name of Object.keys(slots)) {
      const figure = document.getElementById(name);
      if (figure.data) Plotly.Plots.resize(figure);
    }
  }
  // Paper is laid out at once, and Plotly resizes only later: so the drawings are scaled as they are, like pictures.
  window.addEventListener("beforeprint", () => {
    document.querySelectorAll("details").forEach((fold) => { fold.open = true; });
    waiting.length = 0;
    Object.keys(slots).filter((name) => !document.getElementById(name).data).forEach(draw);
    for (const container of document.querySelectorAll(".svg-container")) {
      const { clientWidth: width, clientHeight: height } = container;
      container.style.aspectRatio = `${width} / ${height}`;
      container.querySelectorAll(":scope > .main-svg").forEach((svg) => svg.setAttribute("viewBox", `0 0 ${width} ${height}`));
    }
  });
  window.addEventListener("afterprint", () => {
    document.querySelectorAll(".main-svg").forEach((svg) => svg.removeAttribute("viewBox"));
    resize();
  });
})();
