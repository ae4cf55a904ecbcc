// Draws the charts that the page carries as data. Colours are names ("@ink", "@c1/0.2") of the page's own CSS
// variables, read again whenever the reader's light or dark setting changes or the page goes to paper.
(() => {
  "use strict";
  const { charts, theme, title } = JSON.parse(document.getElementById("charts").textContent);
  const drawn = [];
  let singled = null;

  const colour = (name) => {
    const [key, alpha] = name.slice(1).split("/");
    const value = getComputedStyle(document.documentElement).getPropertyValue("--" + key).trim();
    if (!alpha) return value;
    const n = parseInt(value.slice(1), 16);
    return `rgba(${n >> 16},${(n >> 8) & 255},${n & 255},${alpha})`;
  };
  // Only where a colour or a font belongs: a policy may be called "@ink".
  const resolve = (value, key = "") => {
    if (typeof value === "string") return value[0] === "@" && /color$|^family$/.test(key) ? colour(value) : value;
    if (Array.isArray(value)) return typeof value[0] === "object" && value[0] ? value.map((v) => resolve(v)) : value;
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([name, inner]) => [name, resolve(inner, name)]));
    }
    return value;
  };
  const merge = (base, own) => {
    const both = { ...base };
    for (const [key, value] of Object.entries(own)) {
      const nested = value && typeof value === "object" && !Array.isArray(value) && both[key];
      both[key] = nested ? merge(both[key], value) : value;
    }
    return both;
  };
  const layoutOf = (chart) => {
    const axes = Object.keys(chart.layout).filter((key) => /^[xy]axis/.test(key));
    const own = merge(theme.layout, { ...chart.layout, height: chart.height });
    for (const axis of axes) own[axis] = merge(theme.axis, chart.layout[axis]);
    return resolve(own);
  };
  const dataOf = (chart) => resolve(chart.data).map((trace) => {
    const quiet = singled !== null && trace.meta !== undefined && trace.meta !== singled;
    return quiet ? { ...trace, opacity: 0.13 } : trace;
  });
  const settings = { displayModeBar: false, responsive: true, showTips: false };
  let paper = false;
  const draw = (chart) => {
    const element = document.getElementById("chart-" + chart.key);
    // On paper nothing resizes by itself: the width is said outright.
    const size = paper ? { width: element.clientWidth, autosize: false } : { autosize: true };
    return Plotly.react(element, dataOf(chart), { ...layoutOf(chart), ...size }, settings);
  };
  const drawAll = () => drawn.forEach(draw);
  const single = (run) => {
    if (run === singled) return;
    singled = run;
    drawn.filter((chart) => chart.data.some((trace) => trace.meta !== undefined)).forEach(draw);
  };

  // Far charts wait until they are about to be seen, so that the page is there at once.
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) show(entry.target);
  }, { rootMargin: "600px" });
  const byId = new Map(charts.map((chart) => ["chart-" + chart.key, chart]));
  const show = (element) => {
    seen.unobserve(element);
    const chart = byId.get(element.id);
    if (!drawn.includes(chart)) { drawn.push(chart); draw(chart); }
  };
  for (const id of byId.keys()) seen.observe(document.getElementById(id));

  let pinned = null;
  const buttons = [...document.querySelectorAll("nav.runs button")];
  for (const button of buttons) {
    const run = Number(button.dataset.run);
    button.addEventListener("mouseenter", () => single(run));
    button.addEventListener("mouseleave", () => single(pinned));
    button.addEventListener("click", () => {
      pinned = pinned === run ? null : run;
      for (const other of buttons) other.setAttribute("aria-pressed", String(Number(other.dataset.run) === pinned));
      single(pinned);
    });
  }

  // A click on a heading sorts its table by that column, a second one the other way round; a "–" stays at the end.
  for (const table of document.querySelectorAll("table.sortable")) {
    const headings = [...table.tHead.rows[table.tHead.rows.length - 1].cells];
    headings.forEach((heading, column) => heading.addEventListener("click", () => {
      const up = heading.getAttribute("aria-sort") !== "ascending";
      for (const other of headings) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", up ? "ascending" : "descending");
      const keyOf = (row) => {
        const cell = row.cells[column];
        return column ? (cell && cell.dataset.v !== undefined ? Number(cell.dataset.v) : null) : cell.textContent;
      };
      const compare = (a, b) => {
        const [x, y] = [keyOf(a), keyOf(b)];
        if (x === null || y === null) return (x === null) - (y === null);
        return (up ? 1 : -1) * (typeof x === "string" ? x.localeCompare(y) : x - y);
      };
      table.tBodies[0].append(...[...table.tBodies[0].rows].sort(compare));
    }));
  }

  // One of several views of the same thing.
  for (const nav of document.querySelectorAll("nav.pick")) {
    const choices = [...nav.querySelectorAll("button")];
    for (const choice of choices) {
      choice.addEventListener("click", () => {
        for (const other of choices) {
          const chosen = other === choice;
          other.setAttribute("aria-pressed", String(chosen));
          document.getElementById(other.dataset.view).hidden = !chosen;
        }
      });
    }
  }

  // A chart that leaves the page needs the names and the ground that the page gave it.
  for (const button of document.querySelectorAll(".save button")) {
    button.addEventListener("click", () => {
      const chart = byId.get("chart-" + button.dataset.chart);
      const element = document.getElementById("chart-" + chart.key);
      const layout = layoutOf(chart);
      const named = new Set();
      const data = dataOf(chart).map((trace) => {
        const known = !trace.name || named.has(trace.name);
        named.add(trace.name);
        return { ...trace, showlegend: !known };
      });
      Object.assign(layout, {
        paper_bgcolor: colour("@paper"), showlegend: named.size > 1, legend: { orientation: "h", y: -0.25 },
      });
      const size = { width: element.clientWidth, height: chart.height + (named.size > 1 ? 70 : 0) };
      const picture = { data, layout: { ...layout, ...size } };
      Plotly.downloadImage(picture, { format: button.dataset.format, filename: title + "-" + chart.key, scale: 3, ...size });
    });
  }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  const everything = () => { for (const id of byId.keys()) show(document.getElementById(id)); };
  addEventListener("beforeprint", () => {
    document.documentElement.dataset.theme = "light";
    paper = true;
    everything();
    drawAll();
  });
  addEventListener("afterprint", () => {
    delete document.documentElement.dataset.theme;
    paper = false;
    drawAll();
    for (const chart of drawn) Plotly.Plots.resize("chart-" + chart.key);
  });
})();
