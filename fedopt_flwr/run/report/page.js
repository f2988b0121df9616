"use strict";
(() => {
  const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
  const STROKES = ["", "8 4", "2 3", "8 3 2 3", "12 4", "12 3 2 3"]; // the same in the legend
  const AXES = { rounds: "round", bytes: "bytes down and up, all clients", seconds: "seconds of rounds" };
  const PAPER_WIDTH = 680; // pixels of a portrait page between its margins
  const place = (id) => document.getElementById(id);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const touch = window.matchMedia("(pointer: coarse)");
  let numbers = JSON.parse(place("numbers").textContent);
  let onPaper = false;
  const hidden = new Set(); // names of curves
  const sorted = new Map(); // by table: heading, direction
  let measureSeen = "";

  // elements; texts of a run are set as text, never as HTML
  const make = (kind, text, attributes = {}) => {
    const element = document.createElement(kind);
    element.textContent = text;
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  };
  const fill = (select, options, chosen) => {
    select.replaceChildren(...options.map(([value, text]) => make("option", text, { value })));
    if (options.some(([value]) => value === chosen)) select.value = chosen;
    select.parentElement.hidden = options.length < 2;
  };

  // looks
  const isDark = () => dark.matches && !onPaper;
  const stronger = () => (isDark() ? "lighter" : "darker"); // how larger numbers look
  const shown = (colour) => {
    if (!isDark()) return colour;
    const parts = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
    const light = (0.3 * parts[0] + 0.59 * parts[1] + 0.11 * parts[2]) / 255;
    const white = light < 0.45 ? 0.5 : 0; // too dark on dark ground
    return `rgb(${parts.map((part) => Math.round(part + white * (255 - part))).join(",")})`;
  };
  const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colours = () => onPaper
    ? { ground: "#fff", ink: "#222", line: "#d5d5d5", panel: "#f5f6f8" }
    : { ground: variable("--ground"), ink: variable("--ink"), line: variable("--line"), panel: variable("--panel") };
  const axis = (more) => {
    const { line } = colours();
    return { gridcolor: line, zeroline: false, linecolor: line, automargin: true, ...more };
  };
  // Plotly reads some HTML in texts: a run's own must stay texts
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const draw = (id, traces, layout) => {
    const { ground, ink, line, panel } = colours();
    const whole = {
      paper_bgcolor: ground, plot_bgcolor: ground, font: { color: ink, size: 12 }, showlegend: false,
      margin: { l: 10, r: 18, t: 10, b: 10 }, hoverlabel: { bgcolor: panel, bordercolor: line, font: { color: ink }, namelength: -1, align: "left" },
      dragmode: touch.matches ? false : "zoom", uirevision: "kept",
      ...(onPaper ? { width: PAPER_WIDTH } : { autosize: true }), ...layout,
    };
    place(id).hidden = false; // before it is measured
    return Plotly.react(id, traces, whole, {
      responsive: true, displaylogo: false, displayModeBar: touch.matches ? false : "hover",
      modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
    });
  };
  const clear = (id) => {
    Plotly.purge(id);
    place(id).hidden = true;
  };

  // curves
  const unit = () => document.querySelector("input[name=x]:checked").value;
  const measure = () => numbers.measures.find((m) => m.name === place("measure").value);
  const isNamed = (index) => index < numbers.named; // the others share a grey
  const dashOf = (index) => (isNamed(index) ? index % DASHES.length : 0);
  const lineOf = (index) => ({ color: shown(numbers.colours[index]), dash: DASHES[dashOf(index)], width: isNamed(index) ? 2 : 1 });
  const traceOf = (points, index, found, more) => ({
    meta: index, opacity: isNamed(index) ? 1 : 0.6, x: points.x[unit()], y: points.mean, name: plain(numbers.curves[index]),
    mode: points.mean.length === 1 ? "markers" : "lines", visible: !hidden.has(numbers.curves[index]),
    line: lineOf(index),
    marker: { color: shown(numbers.colours[index]), size: 7 },
    hovertemplate: `%{fullData.name}<br>%{x}: %{y:${found.percent ? ".2%" : ".4g"}}<extra></extra>`, ...more,
  });
  const tracesOf = (found, index, points) => {
    const visible = !hidden.has(numbers.curves[index]);
    const traces = [];
    if (points.low) {
      const edge = { visible, hoverinfo: "skip", mode: "lines", line: { width: 0 }, x: points.x[unit()] };
      const colour = shown(numbers.colours[index]);
      traces.push({ ...edge, y: points.low });
      traces.push({ ...edge, y: points.high, fill: "tonexty", fillcolor: fade(colour) });
    }
    for (const tail of points.tails) traces.push(traceOf(tail, index, found, { meta: null, line: { color: shown(numbers.colours[index]), width: 0.8, dash: "dot" } }));
    traces.push(traceOf(points, index, found));
    for (const mark of points.diverged) {
      traces.push({ visible, x: [mark.x[unit()]], y: [mark.y], mode: "markers", name: plain(numbers.curves[index]),
        marker: { symbol: "x", size: 10, color: numbers.alarm }, hovertemplate: "%{fullData.name}<br>diverged<extra></extra>" });
    }
    return traces;
  };
  const fade = (colour) => {
    const parts = colour.startsWith("#") ? [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16)) : colour.match(/\d+/g);
    return `rgba(${[...parts].slice(0, 3).join(",")},0.15)`;
  };
  const logStep = (values) => { // Plotly labels whole decades alone, or too much of one
    const [least, most] = [Math.min, Math.max].map((end) => values.reduce((a, b) => end(a, b), values[0]));
    const decades = Math.log10(most / least);
    if (!(decades > 0) || decades >= 3) return undefined;
    if (decades >= 0.5) return decades < 1 ? "D1" : "D2";
    const power = 10 ** Math.floor(Math.log10((most - least) / 5));
    return `L${[1, 2, 5, 10].find((n) => n * power >= (most - least) / 5) * power}`;
  };
  const drawCurves = () => {
    const found = measure();
    if (!found) return noCurves();
    if (measureSeen !== found.name) place("log").checked = found.log;
    measureSeen = found.name;
    const log = place("log").checked;
    const order = Object.keys(found.curves).map(Number).reverse(); // the best is drawn last, on top
    const traces = order.flatMap((index) => tracesOf(found, index, found.curves[index]));
    const ends = {}; // Plotly takes no null for a range
    if (log ? found.log_range : found.range) {
      const [low, high] = log ? found.log_range.map(Math.log10) : found.range;
      const margin = 0.04 * (high - low) || 0.1;
      ends.range = [low - margin, high + margin];
    }
    const values = traces.flatMap((trace) => trace.y).filter((value) => value > 0);
    draw("plot-curves", traces, {
      xaxis: axis({ title: { text: AXES[unit()] }, tickformat: unit() === "bytes" ? "~s" : "" }),
      yaxis: axis({ title: { text: plain(found.axis) }, type: log ? "log" : "linear", tickformat: found.percent ? ".3~%" : "~g", dtick: log ? logStep(values) : undefined, ...ends }),
      uirevision: `${found.name} ${unit()} ${log}`, hovermode: "closest",
    });
    place("plot-curves").setAttribute("aria-label", `Curves: ${found.axis} over ${AXES[unit()]}; the last values are in the table of results.`);
    const [most, rounds] = found.thinned;
    const thin = rounds > most ? `Curves of more than ${most} points are thinned (the longest has ${rounds}): of each stretch its least and greatest value are drawn. ` : "";
    const bands = Object.values(found.curves).some((points) => points.low) ? "Bands reach from the least to the greatest of the seeds. " : "";
    const lost = Object.values(found.curves).some((points) => points.diverged.length) ? "× marks where a run diverged. " : "";
    place("note-curves").textContent = thin + bands + lost;
    drawLegend(found);
  };
  const noCurves = () => {
    place("note-curves").textContent = "No round is over yet: there is nothing to draw.";
    clear("plot-curves");
    place("legend").replaceChildren();
    place("all-or-none").hidden = true;
  };
  const swatch = (index) => {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    for (const [name, value] of [["width", "34"], ["height", "10"], ["aria-hidden", "true"]]) svg.setAttribute(name, value);
    const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
    const look = { x1: 0, x2: 34, y1: 5, y2: 5, stroke: shown(numbers.colours[index]), "stroke-width": 3, "stroke-dasharray": STROKES[dashOf(index)] };
    for (const [name, value] of Object.entries(look)) line.setAttribute(name, value);
    svg.append(line);
    return svg;
  };
  const stress = (index, isStressed) => { // one curve among many
    const traces = place("plot-curves").data.flatMap((trace, at) => (trace.meta === index ? [at] : []));
    const { color, width } = lineOf(index);
    const look = isStressed ? { "line.color": isNamed(index) ? color : colours().ink, "line.width": 4, opacity: 1 } : { "line.color": color, "line.width": width, opacity: isNamed(index) ? 1 : 0.6 };
    if (traces.length) Plotly.restyle("plot-curves", look, traces);
  };
  const drawLegend = (found) => {
    const active = document.activeElement?.dataset?.curve;
    const buttons = Object.keys(found.curves).map(Number).map((index) => {
      const name = numbers.curves[index];
      const button = make("button", "", { type: "button", "aria-pressed": String(!hidden.has(name)), "data-curve": name });
      button.append(swatch(index), make("span", name));
      for (const event of ["pointerenter", "focus"]) button.addEventListener(event, () => stress(index, true));
      for (const event of ["pointerleave", "blur"]) button.addEventListener(event, () => stress(index, false));
      button.addEventListener("click", () => {
        if (!hidden.delete(name)) hidden.add(name);
        drawCurves();
      });
      return button;
    });
    place("legend").replaceChildren(...buttons);
    place("all-or-none").hidden = buttons.length < 3;
    if (active !== undefined) buttons.find((button) => button.dataset.curve === active)?.focus();
  };

  // clients
  const run = () => numbers.runs.find(({ name }) => name === place("run").value) || numbers.runs[0];
  const rowAxis = (names, title) => axis({ title: { text: title }, range: [names.length - 0.5, -0.5], tickmode: "array",
    tickvals: spaced(names.length), ticktext: spaced(names.length).map((row) => plain(short(names[row]))) });
  const short = (name) => (name.length > 14 && window.innerWidth < 640 ? `${name.slice(0, 13)}…` : name);
  const spaced = (count) => {
    const step = Math.ceil(count / 12);
    return Array.from({ length: Math.ceil(count / step) }, (_, n) => n * step);
  };
  const columnAxis = (found) => axis({ title: { text: "round" }, tickformat: "d",
    range: [found.first - 0.5, found.first - 0.5 + found.columns.length * found.each[1]] });
  const rounds = (found) => found.columns.map((_, column) => found.first + column * found.each[1] + (found.each[1] - 1) / 2);
  const drawParticipation = (found) => {
    place("note-participation").textContent = found ? "" : "Nobody has been asked yet.";
    if (!found) return clear("plot-participation");
    const x = rounds(found);
    const y = found.clients.map((_, row) => row);
    const most = Math.max(1, ...found.counted.map((row) => Math.max(...row)));
    const failures = new Map(found.failed.map(([row, column, count]) => [`${row} ${column}`, count]));
    const text = found.counted.map((row, r) => row.map((count, c) => {
      const bad = failures.get(`${r} ${c}`) || 0;
      return `client ${plain(found.clients[r])}, round ${found.columns[c]}<br>${count} counted, ${bad} failed`;
    }));
    const { panel } = colours();
    const full = shown("#3B6FB6");
    const heat = { type: "heatmap", x, y, z: found.counted, zmin: 0, zmax: most, showscale: false, xgap: x.length < 80 ? 1 : 0, ygap: y.length < 40 ? 1 : 0,
      colorscale: [[0, panel], [0.0001, isDark() ? "#31547e" : "#b9cde8"], [1, full]], text, hovertemplate: "%{text}<extra></extra>" };
    if (most === 1) heat.colorscale[1][1] = full;
    const areMany = found.failed.length > 500; // a mark each takes seconds
    const filled = { type: "heatmap", x, y, z: found.counted.map((row, r) => row.map((_, c) => (failures.has(`${r} ${c}`) ? 1 : null))),
      colorscale: [[0, numbers.alarm], [1, numbers.alarm]], showscale: false, hoverinfo: "skip" };
    const bad = areMany ? filled : { type: "scatter", mode: "markers", x: found.failed.map(([, c]) => x[c]), y: found.failed.map(([r]) => r),
      marker: { symbol: "x", size: Math.max(4, Math.min(9, 500 / x.length)), color: numbers.alarm }, hoverinfo: "skip" };
    draw("plot-participation", [heat, bad], { xaxis: columnAxis(found), yaxis: rowAxis(found.clients, "client"), uirevision: run().name });
    const [clients, each] = found.each;
    const block = clients * each > 1 ? `A block is ${clients} ${clients > 1 ? "clients" : "client"} in ${each} ${each > 1 ? "rounds" : "round"}, ${stronger()} where more replies counted. ` : "Blue: the reply counted. ";
    const failed = areMany ? "Orange: a reply failed." : found.failed.length ? "× marks a reply that failed." : "No reply failed.";
    place("note-participation").textContent = block + failed;
    place("plot-participation").setAttribute("aria-label", `Who took part in which round. ${block}${failed} The numbers are in the table of clients.`);
  };
  const drawValues = () => {
    const found = run().participation;
    const values = run().values;
    place("client-values").hidden = values.length === 0;
    const chosen = values.find((value) => value.key === place("client-value").value);
    if (!chosen) return clear("plot-values");
    const y = found.clients.map((_, row) => row);
    const text = chosen.z.map((row, r) => row.map((_, c) => `client ${plain(found.clients[r])}, round ${found.columns[c]}`));
    draw("plot-values", [{ type: "heatmap", x: rounds(found), y, z: chosen.z, text, colorscale: "Viridis", colorbar: { thickness: 12, outlinewidth: 0 },
      hoverongaps: false, hovertemplate: "%{text}: %{z:.4g}<extra></extra>" }], { xaxis: columnAxis(found), yaxis: rowAxis(found.clients, "client"), uirevision: chosen.key });
    place("plot-values").setAttribute("aria-label", `${chosen.title}, of each client over rounds; a summary is in the table of clients.`);
  };
  const drawTable = ({ headings, rows, omitted }) => {
    const table = place("table-clients");
    const heading = document.createElement("tr");
    for (const text of headings) {
      const cell = make("th", "", { scope: "col" });
      cell.append(make("button", text, { type: "button" }));
      heading.append(cell);
    }
    table.tHead.replaceChildren(heading);
    table.tBodies[0].replaceChildren(...rows.map((values) => {
      const row = document.createElement("tr");
      row.append(...values.map((value, column) => {
        const text = value === null ? "–" : typeof value === "number" && !column ? String(value) : typeof value === "number" ? value.toLocaleString("en", { maximumSignificantDigits: 5 }) : value;
        const cell = column ? make("td", text) : make("th", text, { scope: "row" });
        if (typeof value === "number") cell.dataset.value = value;
        if (column && typeof value !== "string") cell.className = "number";
        return cell;
      }));
      return row;
    }));
    const more = omitted ? ` The ${numbers.most_rows} with the most failures, then rounds; ${omitted} more have no row.` : "";
    place("caption-clients").textContent = `Rounds, failures and what was recorded of each client.${more}`;
    prepareTables();
  };
  const drawLabels = ({ labels, why_no_labels: why }) => {
    if (!labels) {
      place("note-labels").textContent = `Not shown: ${why}.`;
      return clear("plot-labels");
    }
    const y = labels.clients.map((_, row) => row);
    const x = labels.counts[0].map((_, label) => label);
    const text = labels.counts.map((row, r) => row.map((count, label) => `client ${labels.clients[r]}, label ${label}: ${count} examples`));
    const { panel } = colours();
    draw("plot-labels", [{ type: "heatmap", x, y, z: labels.counts.map((row) => row.map(Math.log1p)), text, colorscale: [[0, panel], [1, shown("#117733")]], showscale: false,
      xgap: 1, ygap: y.length < 40 ? 1 : 0, hovertemplate: "%{text}<extra></extra>" }],
    { xaxis: axis({ title: { text: "label" }, tickformat: "d", dtick: x.length <= 20 ? 1 : undefined }), yaxis: rowAxis(labels.clients, "client") });
    const cut = labels.classes > x.length ? ` Of ${labels.classes} classes the first ${x.length} are drawn.` : "";
    const blocks = labels.each > 1 ? ` A row is ${labels.each} clients.` : "";
    place("note-labels").textContent = `How many examples of each label each client of this run holds, as its configuration divides the data on this machine; data that clients or a program bring along is not seen. The ${stronger()} the more, on a log scale.${blocks}${cut}`;
    place("plot-labels").setAttribute("aria-label", "Examples of each label on each client.");
  };
  const drawClients = () => {
    const own = run();
    fill(place("client-value"), own.values.map(({ key, title }) => [key, title]), place("client-value").value);
    drawParticipation(own.participation);
    drawValues();
    drawTable(own.table);
    drawLabels(own);
  };

  // tables
  const keyOf = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.value === undefined ? cell.textContent.trim() : Number(cell.dataset.value);
  };
  const compare = (a, b) => {
    if (typeof a === typeof b) return typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true });
    return 0;
  };
  // columns come and go, and a target changes, while runs go on
  const headingOf = (cell) => cell.textContent.trim().replace(/^rounds to .*/, "rounds to");
  const sort = (table) => {
    const order = sorted.get(table.id);
    const headings = [...table.tHead.rows[0].cells];
    const column = headings.findIndex((cell) => headingOf(cell) === order?.heading);
    headings.forEach((cell) => cell.removeAttribute("aria-sort"));
    if (column < 0) return;
    headings[column].setAttribute("aria-sort", order.up ? "ascending" : "descending");
    const rows = [...table.tBodies[0].rows].map((row) => [keyOf(row, column), row]);
    const areNumbers = rows.some(([key]) => typeof key === "number");
    const last = (key) => (areNumbers && typeof key !== "number") || key === "–"; // without a value
    rows.sort(([a], [b]) => last(a) - last(b) || (order.up ? compare(a, b) : compare(b, a)));
    table.tBodies[0].append(...rows.map(([, row]) => row));
  };
  const prepareTables = () => {
    for (const table of document.querySelectorAll("table.sortable")) {
      if (!table.tHead.rows.length) continue;
      for (const cell of table.tHead.rows[0].cells) {
        cell.firstElementChild.onclick = () => {
          const before = sorted.get(table.id);
          const heading = headingOf(cell);
          sorted.set(table.id, { heading, up: !(before?.heading === heading && before.up) });
          sort(table);
        };
      }
      sort(table);
    }
  };

  // the whole page
  const drawAll = () => {
    fill(place("measure"), numbers.measures.map(({ name, title }) => [name, title]), place("measure").value);
    fill(place("run"), numbers.runs.map(({ name }) => [name, name]), place("run").value);
    drawCurves();
    drawClients();
    prepareTables();
  };
  const renew = ({ parts, numbers: newer }) => {
    for (const [name, html] of Object.entries(parts)) {
      const part = document.querySelector(`[data-part="${name}"]`);
      if (renew.seen[name] === html) continue;
      renew.seen[name] = html;
      const active = part.contains(document.activeElement) ? document.activeElement : null;
      const button = active && [...part.querySelectorAll("button, [tabindex]")].indexOf(active);
      part.innerHTML = html; // escaped by the server, as in the page itself
      if (active) part.querySelectorAll("button, [tabindex]")[button]?.focus();
    }
    document.title = document.querySelector("h1").textContent;
    numbers = newer;
    drawAll();
  };
  renew.seen = {};
  const tell = (text, isLost) => {
    if (place("state").textContent !== text) place("state").textContent = text;
    place("state").classList.toggle("lost", isLost);
  };
  const ask = async (state) => {
    let seen = state;
    try {
      const answer = await fetch(`content?seen=${encodeURIComponent(seen)}`, { cache: "no-store" });
      if (answer.status === 200) {
        const newer = await answer.json();
        renew(newer);
        seen = newer.state;
      }
      if (answer.ok) tell("Watching: the page follows the run.", false);
      else tell(`Not renewed: ${await answer.text()}`, true);
    } catch (error) {
      tell(`Not renewed: fedopt watch does not answer (${error.message}).`, true);
    }
    setTimeout(ask, 700, seen);
  };

  for (const id of ["measure", "x", "log"]) place(id).addEventListener("change", drawCurves);
  place("show-all").addEventListener("click", () => {
    hidden.clear();
    drawCurves();
  });
  place("hide-all").addEventListener("click", () => {
    for (const name of numbers.curves) hidden.add(name);
    drawCurves();
  });
  place("run").addEventListener("change", drawClients);
  place("client-value").addEventListener("change", drawValues);
  dark.addEventListener("change", drawAll);
  const paper = (value) => () => {
    onPaper = value;
    drawAll();
  };
  window.addEventListener("beforeprint", paper(true));
  window.addEventListener("afterprint", paper(false));
  drawAll();
  if (document.body.dataset.live) setTimeout(ask, 700, document.body.dataset.live);
  document.documentElement.dataset.drawn = "yes";
})();
